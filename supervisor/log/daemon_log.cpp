#include "supervisor/log/daemon_log.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include "ipc/base/whole_io.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/log/log_file.h"

namespace bulkhead::supervisor {
namespace {

class StandardError : public LogTarget {
public:
    void append(std::string_view lines) override {
        // There is nowhere to report a failure.
        (void)write_all(STDERR_FILENO, std::as_bytes(std::span{lines}));
    }
};

/// Passes each line to the writer. A flush, requested by a line about this program's
/// own end, waits.
class WriterSink : public spdlog::sinks::base_sink<std::mutex> {
public:
    WriterSink(std::shared_ptr<LogWriter> writer, std::shared_ptr<LogTarget> target)
        : writer_{std::move(writer)}, target_{std::move(target)} {}

private:
    void sink_it_(const spdlog::details::log_msg& message) override {
        spdlog::memory_buf_t line;
        formatter_->format(message, line);
        writer_->append(target_, std::string{line.data(), line.size()});
    }
    void flush_() override { (void)writer_->flush(); }

    std::shared_ptr<LogWriter> writer_;
    std::shared_ptr<LogTarget> target_;
};

/// With a writer of its own: Ctrl-S in the terminal must not delay lines to the disk.
const auto& standard_error() {
    static const std::pair writer_and_target{std::make_shared<LogWriter>(), std::make_shared<StandardError>()};
    return writer_and_target;
}

}  // namespace

std::optional<LogStore> make_log_store(const std::filesystem::path& runtime_folder) {
    const auto folder = runtime_folder / "logs";
    const int failed = make_own_folder(folder);
    if (failed == 0) return LogStore{folder, std::make_shared<LogWriter>()};
    if (failed == ENOTDIR)
        spdlog::warn("{} is not a folder of this user; logs are kept in memory alone", folder.string());
    else
        spdlog::warn("making {}: {}; logs are kept in memory alone", folder.string(), std::strerror(failed));
    return std::nullopt;
}

void open_daemon_log(const std::optional<LogStore>& store) {
    std::vector<spdlog::sink_ptr> sinks;
    if (store)
        sinks.push_back(
            std::make_shared<WriterSink>(store->writer, std::make_shared<LogFile>(store->folder / "bulkheadd.log")));
    if (sinks.empty() || ::isatty(STDERR_FILENO) == 1)
        sinks.push_back(std::make_shared<WriterSink>(standard_error().first, standard_error().second));
    const auto logger = std::make_shared<spdlog::logger>("bulkhead", sinks.begin(), sinks.end());
    logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
    logger->flush_on(spdlog::level::critical);
    logger->set_error_handler([](const std::string&) {});
    spdlog::set_default_logger(logger);
}

void say_on_standard_error(std::string line) {
    standard_error().first->append(standard_error().second, std::move(line.append("\n")));
}

bool end_daemon_log(const std::optional<LogStore>& store) {
    const bool is_written = !store || store->writer->end();
    return standard_error().first->end() && is_written;
}

}  // namespace bulkhead::supervisor
