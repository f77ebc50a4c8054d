#include "worker/requests/scheduler.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include <fmt/format.h>

namespace bulkhead::worker {

Result<> Scheduler::push(RequestPtr& request, std::size_t running) {
    if (size_ + running >= bound_)
        return Error{ErrorCode::queue_full,
                     fmt::format("{} requests wait or run already, and `queue` is {}", size_ + running, bound_),
                     "send the request again later, or raise `queue` or `replicas` of the model"};
    Queue& queue = queues_[request->channel];
    queue.push_back(std::move(request));
    ++size_;
    return {};
}

RequestPtr Scheduler::next() {
    if (queues_.empty()) return nullptr;
    auto turn = queues_.upper_bound(served_last_);
    if (turn == queues_.end()) turn = queues_.begin();
    served_last_ = turn->first;
    RequestPtr request = std::move(turn->second.front());
    turn->second.pop_front();
    if (turn->second.empty()) queues_.erase(turn);
    --size_;
    return request;
}

std::size_t Scheduler::end(const auto& matches, const auto& answer) {
    std::vector<RequestPtr> taken;
    for (auto& [channel, queue] : queues_) {
        const auto first = std::stable_partition(queue.begin(), queue.end(),
                                                 [&](const RequestPtr& request) { return !matches(*request); });
        std::move(first, queue.end(), std::back_inserter(taken));
        queue.erase(first, queue.end());
    }
    std::erase_if(queues_, [](const auto& entry) { return entry.second.empty(); });
    size_ -= taken.size();
    for (const RequestPtr& request : taken) {
        answer(*request);
        request->let_go();
    }
    return taken.size();
}

std::size_t Scheduler::fail(std::uint64_t channel, std::uint64_t id, const Error& error) {
    return end([&](const PendingRequest& request) { return request.channel == channel && request.id == id; },
               [&](PendingRequest& request) { request.fail(error); });
}
std::size_t Scheduler::fail_all(const Error& error) {
    return end([](const PendingRequest&) { return true; }, [&](PendingRequest& request) { request.fail(error); });
}
std::size_t Scheduler::fail_expired(Clock::time_point now, const std::string& remedy) {
    return end([now](const PendingRequest& request) { return request.deadline <= now; },
               [&](PendingRequest& request) { request.fail(request.deadline_passed("still waiting", now, remedy)); });
}
std::size_t Scheduler::drop(std::uint64_t channel) {
    return end([channel](const PendingRequest& request) { return request.channel == channel; }, [](PendingRequest&) {});
}

Clock::time_point Scheduler::earliest_deadline() const {
    Clock::time_point earliest = never;
    for (const auto& [channel, queue] : queues_)
        for (const RequestPtr& request : queue) earliest = std::min(earliest, request->deadline);
    return earliest;
}

}  // namespace bulkhead::worker
