#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include <boost/system/result.hpp>

#include "ipc/base/error_code.h"

namespace bulkhead {

// Callers branch on ErrorCode. `to_string` gives the one spelling for log, CLI, JSON-RPC and
// channel. Values travel in the channel's error message: append in wire.json, never renumber.
// `internal` is a defect of Bulkhead itself.

[[nodiscard]] std::string_view to_string(ErrorCode code) noexcept;
[[nodiscard]] std::optional<ErrorCode> error_code_from(std::string_view text) noexcept;
/// Empty for a number that this version does not know.
[[nodiscard]] std::optional<ErrorCode> error_code_from(std::uint16_t wire_value) noexcept;

/// One failure. Each layer adds the context that only it knows; none of them logs.
struct Error {
    ErrorCode code = ErrorCode::internal;
    std::string attempt;  ///< what was being done, with the values involved
    std::string remedy;   ///< what the reader can change; empty: nothing

    /// Adds one step of context in front: "loading minilm: opening a.pt2: no such file".
    [[nodiscard]] Error during(std::string_view step) &&;

    /// "code: attempt; remedy" on one line, for logs and terminals.
    [[nodiscard]] std::string text() const;

    friend bool operator==(const Error&, const Error&) = default;
};

template <typename T = void>
using Result = boost::system::result<T, Error>;

/// Finds the last "error: CODE: ATTEMPT; REMEDY" in the output of a Bulkhead program; `internal` if
/// the code is missing or unknown. Empty: no such line.
[[nodiscard]] std::optional<Error> error_in(std::string_view printed);

/// "attempt: strerror(number)", with the code and remedy an operator can use: EMFILE,
/// ENFILE, ENOMEM, ENOSPC become `resources_exhausted`, EACCES and EPERM `not_permitted`,
/// all others `internal`.
[[nodiscard]] Error system_error(std::string_view attempt, int error_number);

/// Thrown by `Result::value()` on an unchecked error.
class ErrorException : public std::runtime_error {
public:
    explicit ErrorException(Error error) : std::runtime_error{error.text()}, error_{std::move(error)} {}
    [[nodiscard]] const Error& error() const noexcept { return error_; }

private:
    Error error_;
};

/// Found by argument-dependent lookup from `boost::system::result`.
[[noreturn]] void throw_exception_from_error(const Error& error, const boost::source_location& where);

}  // namespace bulkhead
