"""The server: HTTP and text on one side of a socket, token ids and the engine on the other.

Read in this order: `launch` (processes), `ipc` (what crosses between them), `engine_process` (the loop
around the scheduler), `engine_client` (its counterpart on the HTTP side), `generation` (tokens become text
and events), then one `api_*` file for each family of endpoints.
"""
