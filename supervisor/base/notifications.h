#pragma once

#include <memory>
#include <set>
#include <string>
#include <string_view>

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

[[nodiscard]] inline std::string notification(std::string_view method, json::object params) {
    return json::serialize(json::object{{"jsonrpc", "2.0"}, {"method", method}, {"params", std::move(params)}}) + "\n";
}

}  // namespace bulkhead::supervisor
