#pragma once

/// Rules of docs/control.md for every client, blocking or not: which calls may be sent again after
/// a supervisor's death, and how requests and errors are spelled.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include <boost/json.hpp>

#include "bulkhead/control.h"
#include "clients/cpp/control/control_connection.h"
#include "ipc/base/error.h"
#include "ipc/links/control_methods.h"

namespace bulkhead::control {

/// Returns `never` for a method that this client does not know.
[[nodiscard]] Repeat repeat_of(std::string_view method);

/// Returns one line with its newline. Errors  input_invalid beyond limits::request_bytes_max
[[nodiscard]] Result<std::string> request_line(std::int64_t id, std::string_view method,
                                               const boost::json::object& params);

/// Returns the parameters for sending a call again: the deadline is the remainder of the first one;
/// `again` marks the repetition.
[[nodiscard]] boost::json::object params_again(const boost::json::object& first,
                                               std::chrono::steady_clock::duration passed, bool marked);

/// Returns the daemon's error, as docs/control.md spells it; `data` gets all its members.
[[nodiscard]] Error error_from(const boost::json::value& answer, boost::json::object& data);

/// Returns the answer's result, and the descriptors that it announces, which came on `connection`.
/// Errors  the daemon's own, see `error_from`; those of ControlConnection::take_fds
[[nodiscard]] Result<Answer> answer_from(boost::json::object object, ControlConnection& connection,
                                         boost::json::object& error_data);

[[nodiscard]] Error lost_answer(std::string_view method);  ///< of a call that may not be sent again
[[nodiscard]] Error no_supervisor(std::chrono::steady_clock::duration waited);
/// Returns the error for a supervisor that does not answer a ping on a new connection within
/// `limits::hang_probe`. Nothing if one answers, or none exists.
[[nodiscard]] std::optional<Error> hang_of_supervisor(const std::filesystem::path& socket);
/// The result of `daemon.stop` if the daemon ended before it could answer.
[[nodiscard]] boost::json::value stopped_without_receipts();

}  // namespace bulkhead::control
