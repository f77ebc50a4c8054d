#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace bulkhead::example {

/// Samples at 16 kHz; `end` is exclusive.
struct Segment {
    std::int64_t start = 0;
    std::int64_t end = 0;
    friend bool operator==(const Segment&, const Segment&) = default;
};

/// Converts one probability per 512 samples to segments of speech, by the rule and the defaults of silero-vad's
/// `get_speech_timestamps` (without its bound on a segment's length). Speech starts at `threshold`, ends where it stays
/// below `threshold - 0.15` for 100 ms, must last 250 ms, and is padded by 30 ms.
inline std::vector<Segment> speech_segments(std::span<const float> probabilities, double threshold) {
    constexpr std::int64_t chunk = 512, min_speech = 4000, min_silence = 1600, pad = 480;
    const double lower = std::max(threshold - 0.15, 0.01);
    const std::int64_t length = chunk * static_cast<std::int64_t>(probabilities.size());
    std::vector<Segment> segments;
    constexpr std::int64_t none = -1;
    std::int64_t start = none, silent_since = none;
    const auto finish = [&](std::int64_t end) {
        if (end - start > min_speech) segments.push_back({start, end});
        start = silent_since = none;
    };
    for (std::size_t i = 0; i < probabilities.size(); ++i) {
        const std::int64_t now = chunk * static_cast<std::int64_t>(i);
        if (probabilities[i] >= threshold) {
            silent_since = none;
            if (start == none) start = now;
        } else if (probabilities[i] < lower && start != none) {
            if (silent_since == none) silent_since = now;
            if (now - silent_since >= min_silence) finish(silent_since);
        }
    }
    if (start != none) finish(length);

    // Neighbours closer than two pads share the silence between them.
    for (std::size_t i = 0; i < segments.size(); ++i) {
        if (i == 0) segments[0].start = std::max<std::int64_t>(0, segments[0].start - pad);
        if (i + 1 == segments.size()) {
            segments[i].end = std::min(length, segments[i].end + pad);
            break;
        }
        const std::int64_t silence = segments[i + 1].start - segments[i].end;
        const std::int64_t share = silence < 2 * pad ? silence / 2 : pad;
        segments[i].end += share;
        segments[i + 1].start -= share;
    }
    return segments;
}

}  // namespace bulkhead::example
