#pragma once

#include <set>
#include <string>
#include <vector>

#include "supervisor/base/notifications.h"
#include "supervisor/base/text.h"
#include "supervisor/base/worker_name.h"

namespace bulkhead::supervisor {

/// Tells subscribers what happens to workers. Keeps nothing for later subscribers.
class EventBus {
public:
    /// An empty set means all models. A second call for a sink replaces its models.
    void subscribe(std::weak_ptr<NotificationSink> sink, std::set<std::string> models) {
        for (Subscription& one : subscriptions_)
            if (one.sinks.contains(sink)) {
                one.models = std::move(models);
                return;
            }
        subscriptions_.push_back({std::move(models), {}});
        subscriptions_.back().sinks.add(std::move(sink));
    }

    /// Adds `members` to time, event, model, replica and generation.
    void publish(std::string_view event, const WorkerName& worker, json::object members) {
        std::erase_if(subscriptions_, [](Subscription& one) { return one.sinks.empty(); });
        for (std::size_t i = 0; i < subscriptions_.size(); ++i) {
            if (!subscriptions_[i].models.empty() && !subscriptions_[i].models.contains(worker.model)) continue;
            json::object params{{"time", unix_ms()},
                                {"event", event},
                                {"model", worker.model},
                                {"replica", worker.replica},
                                {"generation", worker.generation}};
            for (const auto& [name, value] : members) params.insert_or_assign(name, value);
            subscriptions_[i].sinks.notify("event", std::move(params));
        }
    }

private:
    struct Subscription {
        std::set<std::string> models;
        Subscribers sinks;
    };
    std::vector<Subscription> subscriptions_;
};

}  // namespace bulkhead::supervisor
