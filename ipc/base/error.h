#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include <boost/system/result.hpp>

#include "ipc/base/error_code.h"

namespace bulkhead {

// ErrorCode is what a caller branches on. The spelling of `to_string` is the one on every surface: log, CLI, JSON-RPC,
// channel. Values travel in the channel's error message: append in wire.json, never renumber. `internal` is a defect of
// Bulkhead itself.

[[nodiscard]] std::string_view to_string(ErrorCode code) noexcept;
[[nodiscard]] std::optional<ErrorCode> error_code_from(std::string_view text) noexcept;
/// Empty for a number that no version of this enum has used.
[[nodiscard]] std::optional<ErrorCode> error_code_from(std::uint16_t wire_value) noexcept;

/// One failure, told once. Each layer adds what only it knows; none of them logs.
struct Error {
    ErrorCode code = ErrorCode::internal;
    std::string attempt;  ///< what was being done, with the values involved
    std::string remedy;   ///< what the reader can change; empty when nothing

    /// Adds one step of context in front: "loading minilm: opening a.pt2: no such file".
    [[nodiscard]] Error during(std::string_view step) &&;

    /// "code: attempt; remedy" on one line, for logs and terminals.
    [[nodiscard]] std::string text() const;

    friend bool operator==(const Error&, const Error&) = default;
};

template <typename T = void>
using Result = boost::system::result<T, Error>;

/// The last "error: CODE: ATTEMPT; REMEDY" among lines that a program printed, as Bulkhead's spell it; `internal`
/// without a code that is known. Empty: it printed none.
[[nodiscard]] std::optional<Error> error_in(std::string_view printed);

/// "attempt: strerror(number)", with the code and remedy an operator can use: EMFILE, ENFILE, ENOMEM,
/// ENOSPC become `resources_exhausted`, EACCES and EPERM `not_permitted`, all others `internal`.
[[nodiscard]] Error system_error(std::string_view attempt, int error_number);

/// What `Result::value()` throws when nobody looked at the error first.
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
