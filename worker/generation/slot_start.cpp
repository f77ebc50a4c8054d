#include "worker/generation/slot_start.h"

#include <algorithm>

#include <fmt/format.h>

namespace bulkhead::worker::generation {

Result<SlotStart> start_slot(const DrawRules& rules, const Start& start) {
    const std::size_t codebooks = rules.codebooks;
    if (start.rules.forced.size() > codebooks * limits::forced_steps_max)
        return Error{ErrorCode::input_invalid,
                     fmt::format("starting a sequence: {} tokens are forced", start.rules.forced.size()),
                     fmt::format("force at most {} steps of {} tokens", limits::forced_steps_max, codebooks)};
    SlotStart made;
    made.state.sampling = start.sampling;
    made.state.position = start.keep;
    made.forced = start.rules.forced;
    made.state.forced_steps = static_cast<std::uint32_t>(made.forced.size() / codebooks);

    made.flags.assign(codebooks * rules.vocabulary, 0);
    const auto mark = [&](std::size_t codebook, std::int64_t token, TokenFlag flag) {
        // A prompt may hold ids that are never generated.
        if (token >= 0 && token < std::int64_t{rules.vocabulary})
            made.flags[codebook * rules.vocabulary + static_cast<std::size_t>(token)] |= flag;
    };
    // With several codebooks, a row of text is its id and -1s, and contains no code
    // of any codebook.
    const auto see = [&](std::span<const std::int64_t> row) {
        if (codebooks > 1 && std::ranges::any_of(row, [](std::int64_t id) { return id < 0; })) return;
        for (std::size_t c = 0; c < row.size(); ++c) mark(c, row[c], token_seen);
    };
    for (auto rest = start.presence; rest.size() >= codebooks; rest = rest.subspan(codebooks))
        see(rest.first(codebooks));
    const auto first_input = start.first_input.first(std::min(codebooks, start.first_input.size()));
    std::ranges::copy(first_input, made.state.input);
    see(first_input);
    for (const std::int32_t token : start.rules.stop) mark(0, token, token_stops);
    for (const std::int32_t token : start.rules.banned)
        for (std::size_t c = 0; c < codebooks; ++c) mark(c, token, token_banned);

    // Repetition-aware sampling also counts the prompt's last audio.
    if (rules.ras_window == 0) return made;
    for (auto rest = start.presence; rest.size() >= codebooks; rest = rest.subspan(codebooks)) {
        const auto ids = rest.first(codebooks);
        if (std::ranges::any_of(ids, [&](std::int64_t id) { return id < 0 || id >= std::int64_t{rules.vocabulary}; }))
            continue;
        std::int32_t frame[limits::codebooks_max] = {};
        for (std::size_t c = 0; c < codebooks; ++c) frame[c] = static_cast<std::int32_t>(ids[c]);
        remember(made.state, rules, frame);
    }
    return made;
}

}  // namespace bulkhead::worker::generation
