#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ipc/channel/channel_codec.h"
#include "worker/loop/alarm.h"

namespace bulkhead::worker {

/// Tokens of one channel's requests that were not sent to its client yet, cut into parts.
class TokenStreams {
public:
    /// `tokens` are whole steps of `codebooks` each.
    void add(std::uint64_t request, std::uint32_t codebooks, std::span<const std::int32_t> tokens);
    /// Drops what was not sent. No effect where no token came.
    void end(std::uint64_t request);

    /// The next part of any request, or of this one: {"tokens": [t, …], "index": of the first}; with several codebooks
    /// each entry is an array of C. Nothing where no token waits.
    [[nodiscard]] std::optional<channel::InferResult> take_part();
    [[nodiscard]] std::optional<channel::InferResult> take_part(std::uint64_t request);

    [[nodiscard]] bool empty() const { return !unread_since(); }
    /// Since when tokens of some request wait without the client taking any: the longest.
    [[nodiscard]] std::optional<Clock::time_point> unread_since() const;
    /// Requests whose tokens wait since `time` or longer.
    [[nodiscard]] std::vector<std::uint64_t> unread_since(Clock::time_point time) const;

private:
    struct Stream {
        std::uint64_t request;
        std::uint32_t codebooks;
        std::uint64_t index = 0;  ///< steps sent
        std::vector<std::int32_t> unsent{};
        Clock::time_point since{};  ///< where there are some
    };
    static channel::InferResult part_of(Stream& stream);

    std::vector<Stream> streams_;  ///< of requests that have given tokens and have not ended
};

}  // namespace bulkhead::worker
