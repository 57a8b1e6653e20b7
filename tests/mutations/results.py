"""Mutations of results: slots, sums, places in a window (S9, S10), and what pointers name."""

from mutation import (
    CHECK,
    COLUMNS,
    COMBINE,
    COMBINING,
    CONFIG,
    EXPERT_MAJOR,
    FP8,
    GROUPED,
    INDEX_LISTS,
    INDEX_LISTS_API,
    LAYOUTS,
    MAP,
    ROUTING,
    ROWS,
    SUMMATION,
    TILES,
    Edit,
    Mutation,
)

RESULTS = (
    Mutation(
        "parts of a combine without a step between them",
        "S2",
        "combine_parts_test",
        "CombineParts.TheViewOutlivesAllParts",
        (
            Edit(
                COMBINING,
                "  call.at = group.channels.begin(call.at.channel);\n"
                "  end = group.backend->skip(call, deadline_of(group), handle);\n",
                "",
            ),
        ),
    ),
    Mutation(
        "the second part of a combine is that of the first",
        "bits",
        "combine_parts_test",
        "CombineParts.*",
        (
            Edit(
                COMBINE,
                "    return {number * shape.part_tokens(), std::min(shape.max_tokens, (number + 1) * "
                "shape.part_tokens())};",
                "    return {0 * number, shape.part_tokens()};",
            ),
        ),
    ),
    Mutation(
        "own rows summed where sums overwrite them",
        "S9",
        "exchange_test",
        "Exchange.SumsOverTheirRows",
        (Edit(ROWS, "return std::less_equal<>()(a.end, b.begin) ||", "return true ||"),),
    ),
    Mutation(
        "a stale pointer names its successor",
        "pointers",
        "arguments_test",
        "Arguments.StaleObjectsAreNotTheirSuccessors",
        (Edit("src/core/quarantine.h", "constexpr size_t kKept = 256;", "constexpr size_t kKept = 0;"),),
    ),
    Mutation(
        "activations of rows that did not come",
        "valid rows",
        "activation_test",
        "Activation.ValidRowsAlone",
        (Edit("src/quantize/rows.h", "return n < 0 ? 0 : n < each ? n : each;", "return n < 0 ? 0 : each;"),),
    ),
    Mutation(
        "shared exponents rounded up",
        "bits",
        "microscaling_test",
        "Microscaling.FloorsAndSaturates",
        (Edit("src/quantize/mxfp8.h", "exponent = magnitude >> 23;", "exponent = (magnitude + 0x7fffffu) >> 23;"),),
    ),
    Mutation(
        "a global scale of a block that is spoilt",
        "bits",
        "microscaling_test",
        "Microscaling.ValidRowsAlone",
        (Edit("src/quantize/nvfp4.cc", "magnitude < kInfinity ? magnitude : 0", "magnitude"),),
    ),
    Mutation(
        "subnormal elements that a processor flushes",
        "bits",
        "microscaling_test",
        "Microscaling.FlushedOrNot",
        (
            Edit(
                "src/quantize/mxfp8.h",
                "const bool subnormal = magnitude < kLeastNormal;",
                "const bool subnormal = magnitude == 0;",
            ),
        ),
    ),
    Mutation(
        "packed scales from the high end",
        "bits",
        "quantize_test",
        "Quantize.PackedScales",
        (Edit("src/quantize/fp8.h", "word[block % 4] =", "word[3 - block % 4] ="),),
    ),
    Mutation(
        "a sum over a row in another order",
        "bits",
        "activation_test",
        "Activation.TheOrderOfASum",
        (
            Edit(
                "src/activation/swiglu.cc",
                "for (int by = kAccumulators / 2; by >= kGroup; by /= 2) {",
                "for (int by = kGroup; by < kAccumulators; by *= 2) {",
            ),
        ),
    ),
    Mutation(
        "slots by chance",
        "S9",
        "routing_test",
        "Routing.*",
        (Edit(ROUTING, "routing->send_counts[mine[i].rank]++;", "routing->send_counts[mine[i].rank]++ ^ 1;"),),
    ),
    Mutation(
        "a rank twice for one token",
        "S9",
        "routing_test",
        "Routing.*",
        (Edit(ROUTING, "      if (at > 0 && mine[at - 1].rank == rank) continue;\n", ""),),
    ),
    Mutation(
        "ranks in the order of k",
        "S9",
        "routing_test",
        "Routing.*",
        (Edit(ROUTING, "      while (at > 0 && mine[at - 1].rank > rank) --at;\n", ""),),
    ),
    Mutation(
        "partials summed over ranks descending",
        "S9",
        "exchange_test",
        "Exchange.LayoutsWeightingsTypes",
        (
            Edit(
                COMBINE,
                "    sum(out + token * out_stride, rows, nullptr, count, types.of(token));\n",
                "    std::reverse(rows, rows + count);\n"
                "    sum(out + token * out_stride, rows, nullptr, count, types.of(token));\n",
            ),
        ),
    ),
    Mutation(
        "own partial not rounded",
        "S9",
        "exchange_test",
        "Exchange.LayoutsWeightingsTypes",
        (
            # The rank's own rows go around the wire type: kept as float32 until the sum.
            Edit(
                COMBINE,
                "  int64_t row = 0;\n",
                "  int64_t row = 0;\n  auto& kept = unrounded[t.local(0)];\n  kept.clear();\n",
            ),
            Edit(
                COMBINE,
                "      t.put(source, map.inbox(",
                "      if (source == t.rank() && types.to == twBfloat16) {\n"
                "        auto& wide = kept[meta.header->token];\n"
                "        wide.resize(types.elements);\n"
                "        sum(reinterpret_cast<std::byte*>(wide.data()), terms.rows,\n"
                "            types.weighted ? terms.weights : nullptr, terms.count,\n"
                "            RowTypes{types.from, twFloat32, types.elements, types.weighted});\n"
                "      }\n"
                "      t.put(source, map.inbox(",
            ),
            Edit(
                COMBINE,
                "    sum(out + token * out_stride, rows, nullptr, count, types.of(token));\n",
                "    sum(out + token * out_stride, rows, nullptr, count, types.of(token));\n"
                "    if (types.from != twBfloat16 || types.to != twFloat32) continue;\n"
                "    if (!unrounded[t.local(0)].contains(token)) continue;\n"
                "    for (int64_t i = 0; i < types.elements; ++i) {\n"
                "      float total = 0;\n"
                "      for (int32_t position = 0; position < count; ++position) {\n"
                "        const bool own = routing.destinations[routing.first[token] + position].rank == t.rank();\n"
                "        const uint32_t bits = static_cast<const uint16_t*>(rows[position])[i];\n"
                "        const float term = own ? unrounded[t.local(0)][token][i] : std::bit_cast<float>(bits << 16);\n"
                "        total = position == 0 ? term : total + term;\n"
                "      }\n"
                "      reinterpret_cast<float*>(out + token * out_stride)[i] = total;\n"
                "    }\n",
            ),
            Edit(
                COMBINE,
                "// How rows are typed on their way.\n",
                "inline std::map<const void*, std::map<int, std::vector<float>>> unrounded;\n\n"
                "// How rows are typed on their way.\n",
            ),
            Edit(
                COMBINE,
                '#include "exchange/routing.h"\n',
                '#include <map>\n#include <vector>\n\n#include "exchange/routing.h"\n',
            ),
        ),
    ),
    Mutation(
        "sums started from 0",
        "S9",
        "summation_test",
        "Summation.StartsFromTheFirstTerm",
        (
            Edit(
                SUMMATION,
                "float value = kFirst ? term(0, i) : sum[i] + term(0, i);",
                "float value = (kFirst ? 0.0f : sum[i]) + term(0, i);",
            ),
        ),
    ),
    Mutation(
        "ties rounded up instead of to even",
        "S9",
        "summation_test",
        "Summation.NarrowBf16",
        (Edit(SUMMATION, "(bits + 0x7fffu + (bits >> 16 & 1u)) >> 16", "(bits + 0x8000u) >> 16"),),
    ),
    Mutation(
        "banks placed by the bound",
        "S10",
        "layout_test",
        "Layout.BoundMovesNothingOutsideABank",
        (
            Edit(
                MAP,
                "    return payload_row(channel, bank, q, row(source, p, bound));",
                "    const uint64_t bank_bytes = bank_bytes_ / shape_.max_tokens * bound;\n"
                "    return channel_at(channel) + banks_at_ + bank_bytes * bank + payload_at_[q] +\n"
                "           row(source, p, bound) * shape_.payload_bytes[q];",
            ),
            Edit(
                MAP,
                "    return meta_row(channel, bank, row(source, p, bound));",
                "    const uint64_t bank_bytes = bank_bytes_ / shape_.max_tokens * bound;\n"
                "    return channel_at(channel) + banks_at_ + bank_bytes * bank + meta_at_ +\n"
                "           row(source, p, bound) * meta_bytes(shape_.top_k);",
            ),
        ),
    ),
    Mutation(
        "channels placed by the bound",
        "S10",
        "layout_test",
        "Layout.BoundMovesNothingOutsideABank",
        (
            Edit(
                MAP,
                "    return payload_row(channel, bank, q, row(source, p, bound));",
                "    const uint64_t channel_bytes = channel_bytes_ / shape_.max_tokens * bound;\n"
                "    return channels_at_ + channel_bytes * channel + banks_at_ + bank_bytes_ * bank +\n"
                "           payload_at_[q] + row(source, p, bound) * shape_.payload_bytes[q];",
            ),
            Edit(
                MAP,
                "    return meta_row(channel, bank, row(source, p, bound));",
                "    const uint64_t channel_bytes = channel_bytes_ / shape_.max_tokens * bound;\n"
                "    return channels_at_ + channel_bytes * channel + banks_at_ + bank_bytes_ * bank + meta_at_ +\n"
                "           row(source, p, bound) * meta_bytes(shape_.top_k);",
            ),
        ),
    ),
    Mutation(
        "packets over chunk signals",
        "S10",
        "layout_test",
        "Layout.RegionsNeverOverlap",
        (
            Edit(
                MAP, "c.align(c.add(map->chunks_at_, c.mul(2, map->chunks_bytes_)), kPageAlignment)", "map->chunks_at_"
            ),
        ),
    ),
    Mutation(
        "fewer places for rows than slots",
        "S10",
        "layout_test",
        "Layout.ModesShareAWindow",
        (Edit(MAP, "std::max(bank_rows(shape), c.mul(shape.ranks, shape.low_latency_tokens))", "bank_rows(shape)"),),
    ),
    Mutation(
        "unpacked rows lie in the bank, where peers write",
        "S3",
        "layout_test",
        "Layout.RegionsNeverOverlap",
        (Edit(MAP, "map.place_payloads(unpacked_at_, ", "map.place_payloads(0, "),),
    ),
    Mutation(
        "a bank of rows passes for unpacked rows",
        "S3",
        "layout_test",
        "Layout.OnlyTheirReceiverWritesUnpackedRows",
        (Edit(MAP, "at % bank_bytes_ >= unpacked_at_;", "at % bank_bytes_ + 1 >= unpacked_at_;"),),
    ),
    Mutation(
        "ranks may disagree about packets",
        "S10",
        "device_side_test",
        "DeviceSide.LineTokensAreComparedBetweenRanks",
        (Edit(CONFIG, '  visit("TOKENWAY_LINE_TOKENS", config.shape().packet_tokens);\n', ""),),
    ),
    Mutation(
        "ids in device memory read by the host",
        "pointers",
        "device_side_test",
        "PretendedGroup.IdsAreNotReadOnTheHost",
        (Edit(CHECK, "if (too_many.ok() && !group.backend->on_device()) TW_R", "if (too_many.ok()) TW_R"),),
    ),
    Mutation(
        "columns as long as there are rows",
        "S9",
        "columns_test",
        "Columns.ShapeIsToldWhereNothingIsGiven",
        (
            Edit(
                COLUMNS,
                "return {(rows + step - 1) / step * step, element_bytes, block_elements};",
                "return {rows + 0 * step, element_bytes, block_elements};",
            ),
        ),
    ),
    Mutation(
        "the end of a column keeps what was there",
        "S9",
        "columns_test",
        "Columns.HoldTheRowsOfGrouped",
        (Edit(EXPERT_MAJOR, "at < out.columns[q].rows; ++at)", "at < 0; ++at)"),),
    ),
    Mutation(
        "a row of low latency that no expert counts",
        "S9",
        "layouts_test",
        "Layouts.GroupedByBoundTellsWhereExpertsBegin",
        (Edit(GROUPED, "(int64_t row = 0; row < rows; ++row)", "(int64_t row = 1; row < rows; ++row)"),),
    ),
    Mutation(
        "rows of an expert begin right behind those of the one before",
        "S9",
        "layouts_test",
        "Layouts.GroupedByBoundTellsWhereExpertsBegin",
        (Edit(GROUPED, "(counts[expert] + alignment - 1) / alignment * alignment", "counts[expert] + 0 * alignment"),),
    ),
    Mutation(
        "room for a row under one expert alone",
        "bounds",
        "layouts_test",
        "Layouts.*",
        (Edit(LAYOUTS, "ranks * std::min(top_k, local_experts)", "ranks * std::min<int64_t>(top_k, 1)"),),
    ),
    Mutation(
        "experts share one block of columns",
        "S9",
        "columns_test",
        "ExpertMajor.*",
        (Edit(COLUMNS, "return block_elements == 0 ? 0 : expert", "return block_elements >= 0 ? 0 : expert"),),
    ),
    Mutation(
        "origins count the rows that came and not the slots",
        "S9",
        "columns_test",
        "ExpertMajor.*",
        (Edit(EXPERT_MAJOR, "(first_row(source) + p) * shape.top_k + k", "row * shape.top_k + k"),),
    ),
    Mutation(
        "counts by source that add up call after call",
        "S9",
        "columns_test",
        "ExpertMajor.*",
        (
            Edit(
                EXPERT_MAJOR,
                "std::fill_n(out.source_counts, int64_t{local",
                "std::fill_n(out.source_counts, 0 * int64_t{local",
            ),
        ),
    ),
    Mutation(
        "counts by source of another length",
        "bounds",
        "columns_test",
        "ExpertMajor.WhatIsRefused",
        (
            Edit(
                CHECK,
                "const std::vector<int64_t> wanted{group.context.local_experts, group.ranks()};",
                "const std::vector<int64_t> wanted{group.ranks(), group.context.local_experts};",
            ),
        ),
    ),
    Mutation(
        "the last word of packed scales keeps what was there",
        "bits",
        "quantize_test",
        "Quantize.PackedScales",
        (
            Edit(
                FP8,
                "byte < 4 && block + 1 == blocks; ++byte) word[byte] = 0;",
                "byte < 0 && block + 1 == blocks; ++byte) word[byte] = 0;",
            ),
        ),
    ),
    Mutation(
        "blocks of rows share tiles of scales",
        "bits",
        "microscaling_test",
        "Microscaling.Tiles",
        (Edit(TILES, "group * ((each + kTileRows - 1) / kTileRows)", "group * (each / kTileRows)"),),
    ),
    Mutation(
        "a row's last tile of scales keeps what was there",
        "bits",
        "microscaling_test",
        "Microscaling.Tiles",
        (
            Edit(
                TILES,
                "c < kTileScales && block + 1 == blocks; ++c) to[c] = 0;",
                "c < 0 && block + 1 == blocks; ++c) to[c] = 0;",
            ),
        ),
    ),
    Mutation(
        "index lists without the gaps of a view",
        "S9",
        "index_lists_test",
        "IndexLists.OfRankMajor",
        (Edit(INDEX_LISTS, "(first_row(source) + p) * shape.top_k + k", "nth * shape.top_k + k"),),
    ),
    Mutation(
        "an expert's block of index lists goes on with the next one's",
        "S9",
        "index_lists_test",
        "IndexLists.OfRankMajor",
        (Edit(INDEX_LISTS, "    end += blocks * lists.block;\n", "    end += next[expert];\n"),),
    ),
    Mutation(
        "index lists that keep what was beyond their end",
        "S9",
        "index_lists_test",
        "IndexLists.OfRankMajor",
        (
            Edit(
                INDEX_LISTS,
                "lists.block_experts + lists.capacity / lists.block, -1);",
                "lists.block_experts + end / lists.block, -1);",
            ),
        ),
    ),
    Mutation(
        "a block for each choice is room enough",
        "bounds",
        "index_lists_test",
        "IndexLists.Capacity",
        (
            Edit(
                INDEX_LISTS,
                "return (begun + (choices - begun) / block) * block;",
                "return choices + 0 * begun * block;",
            ),
        ),
    ),
    Mutation(
        "index lists of another length",
        "bounds",
        "index_lists_test",
        "IndexLists.WhatIsRefused",
        (
            Edit(
                INDEX_LISTS_API,
                "    TW_RETURN_IF_FAILED(check_rows(wanted, tensor, strides));\n",
                "    (void)wanted, (void)strides;\n",
            ),
        ),
    ),
)
