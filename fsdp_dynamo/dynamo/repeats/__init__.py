"""Calls that Dynamo traces once for all modules that are equal.

A model calls equal modules one after another, and Dynamo traces each. Here it traces the first one
and notes what it has found; for another one that equals it, it puts copies of the nodes into its
graph::

    first module    call -> bytecode -> nodes, guards on the module         both noted
    equal module    the noted guards, asked of this module: do all hold?
                      yes -> the same guards on this module, copies of the nodes
                      no  -> bytecode -> nodes, guards on the module        both noted

No module is taken to be equal because somebody says so. What a trace depends on is what Dynamo
guards, so the guards decide; and as they are installed for every module, a later step notices when
any of them has changed. A call that changes what was there before it, or whose nodes can't be
copied, is traced each time.

- ``operator``: what stands in traced code, and what Dynamo does when it meets it.
- ``calls``: what a call is made with, and keys by which calls may be equal.
- ``notes``: what the trace of a call has found.
- ``copies``: copies of it, for another call.
- ``guards``: the guards on a module, asked of and installed for another one.
- ``changes``: what a trace changes of what was there before it.

torch itself repeats ``invoke_subgraph`` in a similar way since 2.13, without guards on the modules
that it does not trace. Torch 2.11 can't ask a guard of another object: there each call is traced.
"""
