#include "supervisor/log/log_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {

static_assert(limits::log_files_kept == 2, "rotation keeps exactly one predecessor");

bool LogFile::open() {
    if (file_) return true;
    file_ = UniqueFd{::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600)};
    struct stat status {};
    if (!file_ || ::fstat(file_.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
        failed("opening", errno);
        file_.reset();
        return false;
    }
    bytes_ = static_cast<std::size_t>(status.st_size);
    return true;
}

void LogFile::append(std::string_view lines) {
    if (!open()) return;
    if (bytes_ > 0 && bytes_ + lines.size() > limits::log_file_bytes_max) {
        file_.reset();
        const std::string former = path_.string() + ".1";
        if (::rename(path_.c_str(), former.c_str()) != 0) failed("rotating", errno);
        if (!open()) return;
    }
    const ssize_t written = ::write(file_.get(), lines.data(), lines.size());
    if (written < 0) return failed("writing", errno);
    bytes_ += static_cast<std::size_t>(written);
    if (static_cast<std::size_t>(written) < lines.size()) cut_half_line(lines.substr(0, written));
}

/// A full disk took only the beginning of a batch: the next line must not continue a half line.
void LogFile::cut_half_line(std::string_view written) {
    const std::size_t half = written.size() - (written.rfind('\n') + 1);
    const off_t end = ::lseek(file_.get(), 0, SEEK_CUR);
    if (::ftruncate(file_.get(), end - static_cast<off_t>(half)) == 0) bytes_ -= half;
    failed("writing", ENOSPC);
}

void LogFile::failed(const char* what, int error_number) {
    if (std::exchange(warned_, true)) return;
    spdlog::warn("{} {}: {}; lines are kept in memory alone", what, path_.string(), std::strerror(error_number));
}

}  // namespace bulkhead::supervisor
