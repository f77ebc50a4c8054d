#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/base/event_bus.h"
#include "supervisor/log/log_file.h"

namespace bulkhead::supervisor {

struct LogLine {
    std::int64_t time_ms = 0;
    std::uint32_t replica = 0;
    std::uint64_t generation = 0;
    bool by_daemon = false;  ///< a message about the worker or its lines, not its output
    std::string text;        ///< escaped
};

using FormerLines = std::map<std::string, std::vector<LogLine>>;  ///< by model, oldest first

/// The output of one model's replicas: the last lines in memory, more of them in a file, and each
/// new line to its followers.
class ModelLog {
public:
    /// Without a store, writes nothing to disk.
    ModelLog(std::string model, const std::optional<LogStore>& store);

    void append(LogLine line);
    /// Reads the lines that a former supervisor wrote for this model since then, from at most the
    /// last `log_read_back_bytes` of its file. Blocks for the disk.
    [[nodiscard]] static std::vector<LogLine> read_back(const std::filesystem::path& folder, const std::string& model,
                                                        std::int64_t since_unix_ms);
    /// Takes the result of `read_back`. Call before the first `append`.
    void restore(std::vector<LogLine> lines);
    [[nodiscard]] json::array tail(std::size_t lines) const;
    void follow(std::weak_ptr<NotificationSink> sink) { followers_.insert(std::move(sink)); }
    /// Returns the last lines that a worker of this generation printed, oldest first.
    [[nodiscard]] std::vector<std::string> last_lines(std::uint32_t replica, std::uint64_t generation,
                                                      std::size_t max) const;
    /// Returns the last line that a worker of this generation printed; empty if there is none.
    [[nodiscard]] std::string last_line(std::uint32_t replica, std::uint64_t generation) const;

private:
    void keep(LogLine line);

    std::string model_;
    std::shared_ptr<LogFile> file_;      ///< appended to by the writer's thread; null: none
    std::shared_ptr<LogWriter> writer_;
    std::deque<LogLine> lines_;
    std::size_t bytes_ = 0;
    std::set<std::weak_ptr<NotificationSink>, std::owner_less<>> followers_;
};

}  // namespace bulkhead::supervisor
