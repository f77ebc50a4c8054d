#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include <boost/json.hpp>

#include "supervisor/base/text.h"
#include "supervisor/base/worker_name.h"

namespace bulkhead::supervisor {

namespace json = boost::json;

/// A receiver of notifications: a control connection, which bounds unsent data and disconnects
/// a slow reader.
class NotificationSink {
public:
    virtual ~NotificationSink() = default;
    /// Takes one JSON-RPC notification with its newline. Never blocks.
    virtual void notify(const std::string& line) = 0;
    /// Keeps the connection open for notifications even if its client sends nothing more.
    virtual void subscribed() = 0;
};

[[nodiscard]] inline std::string notification(std::string_view method, json::object params) {
    return json::serialize(json::object{{"jsonrpc", "2.0"}, {"method", method}, {"params", std::move(params)}}) + "\n";
}

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
    /// By subscriber.
    std::map<std::weak_ptr<NotificationSink>, std::set<std::string>, std::owner_less<>> models_;
};

}  // namespace bulkhead::supervisor
