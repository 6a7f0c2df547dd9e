"""The HTTP interfaces of other rerank services, a module for each. A module only translates requests and
answers.
"""
