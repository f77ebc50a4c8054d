#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

namespace bulkhead::supervisor {

namespace json = boost::json;

/// A receiver of notifications: a control connection, which bounds unsent data and disconnects a slow reader.
class NotificationSink {
public:
    virtual ~NotificationSink() = default;
    /// Takes one JSON-RPC notification with its newline. Never blocks.
    virtual void notify(const std::string& line) = 0;
    /// Keeps the connection open for notifications even if its client sends nothing more.
    virtual void subscribed() = 0;
};

/// The subscribed sinks. A destroyed sink drops out by itself.
class Subscribers {
public:
    /// Adds a sink only once.
    void add(std::weak_ptr<NotificationSink> sink) {
        if (!contains(sink)) sinks_.push_back(std::move(sink));
    }
    [[nodiscard]] bool contains(const std::weak_ptr<NotificationSink>& sink) const;
    /// Also drops destroyed sinks.
    [[nodiscard]] bool empty();
    void notify(std::string_view method, json::object params);

private:
    std::vector<std::weak_ptr<NotificationSink>> sinks_;
};

}  // namespace bulkhead::supervisor
