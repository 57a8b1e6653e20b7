"""Benchmarks, and what they measure with.

Modules import what stands before them in this order:

control, watch, progress, profiles, routing, gpu_machine     what ranks agree on, and what a run looks at
case, verify, timing, graphs, floor                          one row of a run: its data, its oracle, its times
baselines, gloo, talk, nccl, collective_row, gpu_case and others   what is measured, and beside what
libraries, turns                                             other libraries, in processes of their own
nvlink_options, portable_options, settings, runner           what was asked for, and how ranks measure it
cpu, overhead, nvlink, portable, collectives, auxiliary      the kinds of runs, each of which returns plain data
hosts_options, hosts                                         likewise, between hosts
tables, peers, report                                        such data as tables
options, command                                             `tokenway bench`
record, placement, replicas, balancing, namespaces           programs beside it
"""
