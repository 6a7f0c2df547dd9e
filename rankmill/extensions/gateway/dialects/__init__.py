"""A module for each rerank service whose HTTP interface the gateway has. Each module only translates requests
and answers.
"""
