#include "ipc/base/error.h"

#include <cerrno>
#include <cstring>
#include <utility>

namespace bulkhead {

std::string_view to_string(ErrorCode code) noexcept {
    for (const auto& [value, name] : error_code_names)
        if (value == code) return name;
    return "unknown";
}

std::optional<ErrorCode> error_code_from(std::string_view text) noexcept {
    for (const auto& [value, name] : error_code_names)
        if (name == text) return value;
    return std::nullopt;
}

std::optional<ErrorCode> error_code_from(std::uint16_t wire_value) noexcept {
    for (const auto& [value, name] : error_code_names)
        if (static_cast<std::uint16_t>(value) == wire_value) return value;
    return std::nullopt;
}

Error Error::during(std::string_view step) && {
    attempt.insert(0, std::string{step} + ": ");
    return std::move(*this);
}

std::string Error::text() const {
    std::string line{to_string(code)};
    line += ": " + attempt;
    if (!remedy.empty()) line += "; " + remedy;
    return line;
}

std::optional<Error> error_in(std::string_view printed) {
    constexpr std::string_view mark = "error: ";
    const std::size_t start = printed.rfind(mark);
    if (start == std::string_view::npos) return std::nullopt;
    std::string_view line = printed.substr(start + mark.size());
    line = line.substr(0, line.find('\n'));
    Error error;
    const std::size_t colon = line.find(": ");
    if (const auto code = error_code_from(line.substr(0, colon)); code && colon != std::string_view::npos) {
        error.code = *code;
        line.remove_prefix(colon + 2);
    }
    const std::size_t semicolon = line.rfind("; ");
    error.attempt = line.substr(0, semicolon);
    if (semicolon != std::string_view::npos) error.remedy = line.substr(semicolon + 2);
    return error;
}

Error system_error(std::string_view attempt, int error_number) {
    const std::string text = std::string{attempt} + ": " + std::strerror(error_number);
    switch (error_number) {
    case EMFILE:
    case ENFILE: return {ErrorCode::resources_exhausted, text, "raise the limit on open files (ulimit -n)"};
    case ENOMEM: return {ErrorCode::resources_exhausted, text, "free host memory or raise the process' memory limit"};
    case ENOSPC:
    case EDQUOT: return {ErrorCode::resources_exhausted, text, "free space on the file system"};
    case EACCES:
    case EPERM:
    case EROFS:
        return {ErrorCode::not_permitted, text, "check the owner and mode of the path and of the folders above it"};
    default: return {ErrorCode::internal, text, {}};
    }
}

void throw_exception_from_error(const Error& error, const boost::source_location& /*where*/) {
    throw ErrorException{error};
}

}  // namespace bulkhead
