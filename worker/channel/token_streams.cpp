#include "worker/channel/token_streams.h"

#include <algorithm>
#include <utility>

#include "worker/generation/request_limits.h"

namespace bulkhead::worker {

void TokenStreams::add(std::uint64_t request, std::uint32_t codebooks, std::span<const std::int32_t> tokens) {
    auto stream = std::ranges::find(streams_, request, &Stream::request);
    if (stream == streams_.end()) stream = streams_.insert(stream, {request, codebooks});
    if (stream->unsent.empty()) stream->since = Clock::now();
    stream->unsent.insert(stream->unsent.end(), tokens.begin(), tokens.end());
}

void TokenStreams::end(std::uint64_t request) {
    std::erase_if(streams_, [request](const Stream& stream) { return stream.request == request; });
}

std::optional<channel::InferResult> TokenStreams::take_part(std::optional<std::uint64_t> request) {
    const auto found = std::ranges::find_if(streams_, [&](const Stream& each) {
        return !each.unsent.empty() && each.request == request.value_or(each.request);
    });
    if (found == streams_.end()) return std::nullopt;
    Stream& stream = *found;
    const std::size_t width = stream.codebooks;
    const std::size_t steps_max = std::max<std::size_t>(1, generation::limits::part_tokens_max / width);
    const std::size_t steps = std::min(steps_max, stream.unsent.size() / width);
    boost::json::array entries;
    entries.reserve(steps);
    for (std::size_t step = 0; step < steps; ++step) {
        const auto tokens = std::span{stream.unsent}.subspan(step * width, width);
        if (width == 1)
            entries.emplace_back(tokens.front());
        else
            entries.emplace_back(boost::json::array(tokens.begin(), tokens.end()));
    }
    boost::json::object values{{"tokens", std::move(entries)}, {"index", stream.index}};
    stream.unsent.erase(stream.unsent.begin(), stream.unsent.begin() + static_cast<std::ptrdiff_t>(steps * width));
    stream.index += steps;
    stream.since = Clock::now();
    return channel::InferResult{stream.request, true, {}, std::move(values)};
}

Clock::time_point TokenStreams::unread_since() const {
    Clock::time_point longest = never;
    for (const Stream& stream : streams_)
        if (!stream.unsent.empty()) longest = std::min(longest, stream.since);
    return longest;
}

std::vector<std::uint64_t> TokenStreams::unread_since(Clock::time_point time) const {
    std::vector<std::uint64_t> requests;
    for (const Stream& stream : streams_)
        if (!stream.unsent.empty() && stream.since <= time) requests.push_back(stream.request);
    return requests;
}

}  // namespace bulkhead::worker
