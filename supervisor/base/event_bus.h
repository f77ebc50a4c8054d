#pragma once

#include <map>
#include <set>
#include <string>

#include "supervisor/base/notifications.h"
#include "supervisor/base/text.h"
#include "supervisor/base/worker_name.h"

namespace bulkhead::supervisor {

/// Tells subscribers what happens to workers. Keeps nothing for later subscribers.
class EventBus {
public:
    /// An empty set means all models. A second call for a sink replaces its models.
    void subscribe(std::weak_ptr<NotificationSink> sink, std::set<std::string> models) {
        models_.insert_or_assign(std::move(sink), std::move(models));
    }

    /// Adds `members` to time, event, model, replica and generation.
    void publish(std::string_view event, const WorkerName& worker, json::object members) {
        std::erase_if(models_, [](const auto& one) { return one.first.expired(); });
        if (models_.empty()) return;
        json::object params{{"time", unix_ms()},
                            {"event", event},
                            {"model", worker.model},
                            {"replica", worker.replica},
                            {"generation", worker.generation}};
        for (auto& [name, value] : members) params.insert_or_assign(name, std::move(value));
        const std::string line = notification("event", std::move(params));
        for (const auto& [weak, models] : models_)
            if (const auto sink = weak.lock(); sink && (models.empty() || models.contains(worker.model)))
                sink->notify(line);
    }

private:
    std::map<std::weak_ptr<NotificationSink>, std::set<std::string>, std::owner_less<>> models_;  ///< by subscriber
};

}  // namespace bulkhead::supervisor
