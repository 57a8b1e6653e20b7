"""What an exchange would take on a machine that one does not have: the command `tokenway plan`.

`fitting` makes constants of measured files, `machines` adds those that are published or assumed, `rows` says how many
rows go where, `model` what that takes, `simulation` how it spreads, `memory` what windows hold. docs/PLANNING.md says
how far each of them is to be believed.
"""
