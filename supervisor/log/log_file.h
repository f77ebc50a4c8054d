#pragma once

#include <filesystem>
#include <string_view>

#include "ipc/base/unique_fd.h"
#include "supervisor/log/log_writer.h"

namespace bulkhead::supervisor {

/// A text file of at most `log_file_bytes_max` bytes; its predecessor is NAME.1 beside it. A full
/// disk or a read-only folder loses whole lines and logs one warning, nothing else.
///
/// Thread  the log writer's
class LogFile : public LogTarget {
public:
    /// The first line opens the file.
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
