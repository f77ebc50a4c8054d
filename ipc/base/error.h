#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include <boost/system/result.hpp>

namespace bulkhead {

/// What a caller branches on. The spelling of `to_string` is the one on every surface: log, CLI,
/// JSON-RPC, channel. Values travel in the channel's error message: append, never renumber.
enum class ErrorCode : std::uint16_t {
    internal = 1,  ///< a defect of Bulkhead itself, reported instead of hidden
    config_invalid = 2,
    model_unknown = 3,
    method_unknown = 4,
    model_loading = 5,
    model_quarantined = 6,
    queue_full = 7,
    deadline_exceeded = 8,
    cancelled = 9,
    shape_mismatch = 10,
    dtype_unsupported = 11,
    out_of_memory = 12,
    worker_lost = 13,
    worker_draining = 14,
    capture_failed = 15,
    load_failed = 16,
    package_incompatible = 17,
    busy = 18,                 ///< a stateful model has its one client
    resources_exhausted = 19,  ///< fds, memfds, disk, slab bytes
    already_running = 20,
    protocol_violation = 21,
    not_permitted = 22,
    not_running = 23,       ///< no daemon answers
    input_invalid = 24,     ///< missing, surplus or misnamed inputs and parameters
    inference_failed = 25,  ///< the model's own code raised
};

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
