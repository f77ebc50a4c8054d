#include "worker/requests/scheduler.h"

#include <algorithm>
#include <iterator>

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

template <typename Matches>
void Scheduler::remove_if(Queue& queue, std::vector<RequestPtr>& removed, Matches matches) {
    const auto kept = std::stable_partition(queue.begin(), queue.end(),
                                            [&](const RequestPtr& request) { return !matches(*request); });
    removed.insert(removed.end(), std::make_move_iterator(kept), std::make_move_iterator(queue.end()));
    size_ -= static_cast<std::size_t>(std::distance(kept, queue.end()));
    queue.erase(kept, queue.end());
}

RequestPtr Scheduler::remove(std::uint64_t channel, std::uint64_t id) {
    const auto queue = queues_.find(channel);
    if (queue == queues_.end()) return nullptr;
    std::vector<RequestPtr> removed;
    remove_if(queue->second, removed, [id](const Request& request) { return request.id == id; });
    if (queue->second.empty()) queues_.erase(queue);
    return removed.empty() ? nullptr : std::move(removed.front());
}

std::vector<RequestPtr> Scheduler::remove_channel(std::uint64_t channel) {
    std::vector<RequestPtr> removed;
    const auto queue = queues_.find(channel);
    if (queue == queues_.end()) return removed;
    remove_if(queue->second, removed, [](const Request&) { return true; });
    queues_.erase(queue);
    return removed;
}

std::vector<RequestPtr> Scheduler::remove_all() {
    std::vector<RequestPtr> removed;
    for (auto& [channel, queue] : queues_) remove_if(queue, removed, [](const Request&) { return true; });
    queues_.clear();
    return removed;
}

std::vector<RequestPtr> Scheduler::remove_expired(Clock::time_point now) {
    std::vector<RequestPtr> removed;
    for (auto& [channel, queue] : queues_)
        remove_if(queue, removed, [now](const Request& request) { return request.deadline <= now; });
    std::erase_if(queues_, [](const auto& entry) { return entry.second.empty(); });
    return removed;
}

std::optional<Clock::time_point> Scheduler::earliest_deadline() const {
    std::optional<Clock::time_point> earliest;
    for (const auto& [channel, queue] : queues_)
        for (const RequestPtr& request : queue)
            if (!earliest || request->deadline < *earliest) earliest = request->deadline;
    return earliest;
}

}  // namespace bulkhead::worker
