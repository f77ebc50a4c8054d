#include "worker/slabs/held_stream_watch.h"

#include <algorithm>

#include <fmt/format.h>

#include "worker/loop/limits.h"

namespace bulkhead::worker {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

HeldStreamWatch::HeldStreamWatch(boost::asio::io_context& io, milliseconds request_deadline,
                                 std::function<void(const Error&)> stuck)
    : deadline_{request_deadline}, stuck_{std::move(stuck)}, next_look_{io, [this] { return look(); }} {}

void HeldStreamWatch::add(std::shared_ptr<const ChannelEvents> events, std::string client) {
    Gone gone{std::move(events), std::move(client), 0, {}};
    const Clock::time_point now = Clock::now();
    if (has_passed(gone, now)) return;
    gone_.push_back(std::move(gone));
    next_look_.no_later_than(now + deadline_ / limits::held_stream_looks);
}

bool HeldStreamWatch::has_passed(Gone& gone, Clock::time_point now) {
    const ChannelEvents::Held held = gone.events->held_at();
    if (held.wait != gone.wait) gone.since = now;
    gone.wait = held.wait;
    return !held.any;
}

std::optional<Clock::time_point> HeldStreamWatch::look() {
    const Clock::time_point now = Clock::now();
    std::erase_if(gone_, [&](Gone& gone) { return has_passed(gone, now); });
    for (const Gone& gone : gone_)
        if (gone.wait != 0 && now - gone.since >= deadline_) {
            stuck_(Error{
                ErrorCode::deadline_exceeded,
                fmt::format("the GPU stream waits for an event of client \"{}\", which is gone, for {} ms, and {}",
                            gone.client, duration_cast<milliseconds>(now - gone.since).count(),
                            gone.wait == ChannelEvents::Held::in_driver
                                ? "the driver has not returned from queuing the wait"
                                : "recording the event in its place did not free it"),
                "the worker ends, and another one takes its place"});
            return std::nullopt;
        }
    if (gone_.empty()) return std::nullopt;
    Clock::time_point next = now + std::max<Clock::duration>(deadline_ / limits::held_stream_looks, milliseconds{1});
    for (const Gone& gone : gone_)
        if (gone.wait != 0) next = std::min(next, gone.since + deadline_);
    return next;
}

}  // namespace bulkhead::worker
