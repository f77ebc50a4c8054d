#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

namespace bulkhead::supervisor {

namespace json = boost::json;

/// Who takes notifications: a control connection, which bounds what waits and closes a slow reader.
class NotificationSink {
public:
    virtual ~NotificationSink() = default;
    /// One JSON-RPC notification, newline included. Never blocks.
    virtual void notify(const std::string& line) = 0;
    /// Somebody will notify it: it stays though its client may have nothing more to say.
    virtual void subscribed() = 0;
};

/// Sinks that come by asking and go by dying.
class Subscribers {
public:
    /// Once, however often it asks.
    void add(std::weak_ptr<NotificationSink> sink) {
        if (!contains(sink)) sinks_.push_back(std::move(sink));
    }
    [[nodiscard]] bool contains(const std::weak_ptr<NotificationSink>& sink) const;
    /// Also forgets the sinks that are gone.
    [[nodiscard]] bool empty();
    void notify(std::string_view method, json::object params);

private:
    std::vector<std::weak_ptr<NotificationSink>> sinks_;
};

}  // namespace bulkhead::supervisor
