#pragma once

/// The worker link's packets as values. Defined in `worker_link.json`, described in
/// docs/worker-link.md.

#include <string_view>

#include <boost/json.hpp>

#include "ipc/base/error.h"
#include "ipc/links/worker_link_messages.h"

namespace bulkhead::worker_link {

[[nodiscard]] boost::json::object to_json(const ToDaemon& message);
[[nodiscard]] boost::json::object to_json(const ToWorker& message);

/// Texts are unescaped, as the sender wrote them.
/// Errors  protocol_violation: not a JSON object, no type, or a required member is missing
[[nodiscard]] Result<ToDaemon> parse_to_daemon(std::string_view packet);
[[nodiscard]] Result<ToWorker> parse_to_worker(std::string_view packet);

[[nodiscard]] Error violation(std::string_view what);

}  // namespace bulkhead::worker_link
