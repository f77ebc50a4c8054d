#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ipc/channel/channel_codec.h"
#include "worker/loop/alarm.h"

namespace bulkhead::worker {

/// Unsent tokens of one channel's requests, cut into parts.
class TokenStreams {
public:
    /// Adds whole steps of `codebooks` tokens each.
    void add(std::uint64_t request, std::uint32_t codebooks, std::span<const std::int32_t> tokens);
    /// Drops the request's unsent tokens. No effect if it has none.
    void end(std::uint64_t request);

    /// Returns the next part of any request, or of this one: {"tokens": [t, …], "index": of the
    /// first}. With several codebooks each entry is an array of C. Nothing if no token waits.
    [[nodiscard]] std::optional<channel::InferResult> take_part(std::optional<std::uint64_t> request = {});

    [[nodiscard]] bool empty() const { return unread_since() == never; }
    /// The earliest time since which a client has left tokens of some request unread; `never` if it
    /// has read all.
    [[nodiscard]] Clock::time_point unread_since() const;
    /// Requests whose tokens have been unread since `time` or longer.
    [[nodiscard]] std::vector<std::uint64_t> unread_since(Clock::time_point time) const;

private:
    struct Stream {
        std::uint64_t request;
        std::uint32_t codebooks;
        std::uint64_t index = 0;  ///< steps sent
        std::vector<std::int32_t> unsent{};
        Clock::time_point since{};  ///< start of the wait, if `unsent` is not empty
    };

    std::vector<Stream> streams_;  ///< of requests that have given tokens and have not ended
};

}  // namespace bulkhead::worker
