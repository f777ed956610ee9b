"""Other libraries on top of fsdp_dynamo; nothing in the package imports these files."""
