#pragma once

/// What docs/control.md asks of every client, blocking or not: which calls may be sent again after a supervisor died,
/// and how requests and errors are spelled.

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include <boost/json.hpp>

#include "bulkhead/control.h"
#include "clients/cpp/control/control_connection.h"
#include "ipc/base/error.h"
#include "ipc/links/control_methods.h"

namespace bulkhead::control {

/// `never` for a method that this client does not know.
[[nodiscard]] Repeat repeat_of(std::string_view method);

/// One line with its newline. Errors  input_invalid beyond limits::request_bytes_max
[[nodiscard]] Result<std::string> request_line(std::int64_t id, std::string_view method,
                                               const boost::json::object& params);

/// The parameters for sending a call again: the deadline is what is left of the first one, and `again` marks the
/// repetition.
[[nodiscard]] boost::json::object params_again(const boost::json::object& first,
                                               std::chrono::steady_clock::duration passed, bool marked);

/// The daemon's own error, as docs/control.md spells it; `data` gets all that it said.
[[nodiscard]] Error error_from(const boost::json::value& answer, boost::json::object& data);

/// What an answer brings: its result, and the descriptors that it announces, which came on `connection`.
/// Errors  the daemon's own, see `error_from`; those of ControlConnection::take_fds
[[nodiscard]] Result<Answer> answer_from(boost::json::object object, ControlConnection& connection,
                                         boost::json::object& error_data);

[[nodiscard]] Error lost_answer(std::string_view method);  ///< of a call that may not be asked again
[[nodiscard]] Error no_supervisor(std::chrono::steady_clock::duration waited);
/// What `daemon.stop` brings when the daemon has ended before it could answer.
[[nodiscard]] boost::json::value stopped_without_receipts();

}  // namespace bulkhead::control
