"""A module for each rerank service whose HTTP interface the gateway has. It only translates requests and
answers.
"""
