#pragma once

#include <filesystem>
#include <string_view>

#include "ipc/base/unique_fd.h"
#include "supervisor/log/log_writer.h"

namespace bulkhead::supervisor {

/// A text file of at most `log_file_bytes_max` bytes, with its predecessor beside it as NAME.1.
/// A full disk or a read-only folder costs lines of that time, whole ones, and one warning, nothing else.
///
/// Thread  the writer's
class LogFile : public LogTarget {
public:
    /// Opened by the first line.
    explicit LogFile(std::filesystem::path path) : path_{std::move(path)} {}

    void append(std::string_view lines) override;

private:
    bool open();
    void cut_half_line(std::string_view written);
    void failed(const char* what, int error_number);

    std::filesystem::path path_;
    UniqueFd file_;
    std::size_t bytes_ = 0;
    bool warned_ = false;
};

}  // namespace bulkhead::supervisor
