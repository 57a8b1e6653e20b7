"""Mutations of leases: who may write where, and for how long."""

from mutation import CALLS, COUNTS_H, LEASES, NOTES, Edit, Mutation

LEASES_MUTATIONS = (
    Mutation(
        "a lease is leased again while it lives",
        "leases",
        "leases_test",
        "Leases.RowsLandAndStay",
        (
            Edit(
                LEASES,
                "    found->second.announced = false;\n    if (found->second.given) leases_.erase(found);\n",
                "    leases_.erase(found);\n",
            ),
        ),
    ),
    Mutation(
        "gaps are measured from the wrong end",
        "leases",
        "leases_test",
        "Leases.FirstGapThatIsLargeEnough",
        (Edit(LEASES, "      free = next->first + next->second.bytes;\n", "      free = next->first;\n"),),
    ),
    Mutation(
        "a lease that was announced is leased again at once when it is freed",
        "leases",
        "leases_test",
        "Leases.FreedWhileAnnounced",
        (
            Edit(
                LEASES,
                "  if (found->second.announced) {\n    found->second.given = true;\n"
                "  } else {\n    leases_.erase(found);\n  }\n",
                "  leases_.erase(found);\n",
            ),
        ),
    ),
    Mutation(
        "later dispatches of the routing land in the lease too",
        "leases",
        "leases_test",
        "Leases.LandsOnce",
        (
            Edit(
                CALLS,
                "handle.has_offsets && call->rows.own && exact;\n  handle.has_offsets = false;\n",
                "handle.has_offsets && call->rows.own && exact;\n",
            ),
            Edit(
                CALLS,
                "  handle.has_offsets = false;\n  if (handle.leases.empty()) return;\n",
                "  if (handle.leases.empty()) return;\n",
            ),
        ),
    ),
    Mutation(
        "one rank's rows land, another's do not, and nobody notices",
        "notes",
        "leases_test",
        "Leases.RanksMustAgree",
        (
            Edit(
                NOTES,
                "static_cast<uint32_t>(bound) | (has_offsets ? kHasOffsets : 0);",
                "static_cast<uint32_t>(bound) | (has_offsets ? 0u : 0u);",
            ),
        ),
    ),
    Mutation(
        "places beyond the leases are written to",
        "leases",
        "leases_test",
        "Leases.PlacesAreChecked",
        (Edit(COUNTS_H, "at - map.leases() > shape.lease_bytes - bytes", "at - map.leases() > shape.lease_bytes"),),
    ),
)
