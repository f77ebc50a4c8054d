#include "supervisor/daemon_log.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include <spdlog/sinks/rotating_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "supervisor/limits.h"

namespace bulkhead::supervisor {

std::optional<std::filesystem::path> make_log_folder(const std::filesystem::path& runtime_folder) {
    const auto folder = runtime_folder / "logs";
    struct stat status {};
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
        spdlog::warn("making {}: {}; logs are kept in memory alone", folder.string(), std::strerror(errno));
        return std::nullopt;
    }
    if (::lstat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != ::geteuid()) {
        spdlog::warn("{} is not a folder of this user; logs are kept in memory alone", folder.string());
        return std::nullopt;
    }
    return folder;
}

void open_daemon_log(const std::optional<std::filesystem::path>& folder) {
    std::vector<spdlog::sink_ptr> sinks;
    if (folder) {
        try {
            sinks.push_back(std::make_shared<spdlog::sinks::rotating_file_sink_st>(
                (*folder / "bulkheadd.log").string(), limits::log_file_bytes_max, limits::log_files_kept - 1));
        } catch (const spdlog::spdlog_ex& failure) {
            spdlog::warn("opening the daemon's log: {}", failure.what());
        }
    }
    if (sinks.empty() || ::isatty(STDERR_FILENO) == 1)
        sinks.push_back(std::make_shared<spdlog::sinks::stderr_sink_st>());
    const auto logger = std::make_shared<spdlog::logger>("bulkhead", sinks.begin(), sinks.end());
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
    logger->flush_on(spdlog::level::info);
    // A full disk costs lines, and must not cost a line about each of them.
    logger->set_error_handler([](const std::string&) {});
    spdlog::set_default_logger(logger);
}

}  // namespace bulkhead::supervisor
