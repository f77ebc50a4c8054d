#include "supervisor/log/log_writer.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

struct Entry {
    std::shared_ptr<LogTarget> target;
    std::string lines;
};

std::uint64_t count_lines(std::string_view lines) {
    return static_cast<std::uint64_t>(std::count(lines.begin(), lines.end(), '\n'));
}

}  // namespace

struct LogWriter::State {
    mutable std::mutex mutex;
    mutable std::condition_variable changed;
    std::deque<Entry> waiting;
    std::size_t bytes = 0;  ///< of waiting lines
    std::map<std::string, std::function<void()>> saves;
    std::map<const LogTarget*, std::uint64_t> missing;  ///< lines dropped before the
                                                        ///< target's next write
    std::uint64_t lost = 0;
    bool writing = false;
    bool ending = false;

    [[nodiscard]] bool has_work() const { return !waiting.empty() || !saves.empty(); }
    /// Waits until all is written. False: not within `log_flush_deadline`.
    bool flush(std::unique_lock<std::mutex>& lock) const {
        return changed.wait_for(lock, limits::log_flush_deadline, [&] { return !writing && !has_work(); });
    }
    /// Call with the lock held.
    void lose(const LogTarget* target, std::uint64_t lines) {
        lost += lines;
        missing[target] += lines;
    }
};

LogWriter::LogWriter() : state_{std::make_shared<State>()} {}

LogWriter::~LogWriter() { (void)end(); }

void LogWriter::append(std::shared_ptr<LogTarget> target, std::string lines) {
    const std::unique_lock lock{state_->mutex};
    if (state_->ending) return;
    auto& waiting = state_->waiting;
    state_->bytes += lines.size();
    if (!waiting.empty() && waiting.back().target == target &&
        waiting.back().lines.size() + lines.size() <= limits::log_batch_bytes_max)
        waiting.back().lines += lines;
    else
        waiting.push_back({std::move(target), std::move(lines)});
    while (state_->bytes > limits::log_waiting_bytes_max) {
        const Entry oldest = std::move(waiting.front());
        waiting.pop_front();
        state_->bytes -= oldest.lines.size();
        state_->lose(oldest.target.get(), count_lines(oldest.lines));
    }
    wake();
}

void LogWriter::save(std::string name, std::function<void()> save) {
    const std::unique_lock lock{state_->mutex};
    if (state_->ending) return;
    state_->saves.insert_or_assign(std::move(name), std::move(save));
    wake();
}

/// Call with the lock held. If the system cannot create a thread, everything waits for
/// the next line.
void LogWriter::wake() {
    state_->changed.notify_all();
    if (thread_.joinable()) return;
    try {
        thread_ = std::thread{[state = state_] { work(*state); }};
    } catch (const std::system_error&) {
    }
}

void LogWriter::work(State& state) {
    std::unique_lock lock{state.mutex};
    while (true) {
        state.changed.wait(lock, [&] { return state.ending || state.has_work(); });
        if (!state.has_work()) return;
        state.writing = true;
        if (const auto first = state.saves.begin(); first != state.saves.end()) {
            const auto save = std::move(first->second);
            state.saves.erase(first);
            lock.unlock();
            save();
        } else {
            const Entry entry = std::move(state.waiting.front());
            state.waiting.pop_front();
            state.bytes -= entry.lines.size();
            const auto gap = state.missing.extract(entry.target.get());
            lock.unlock();
            if (!gap.empty())
                entry.target->append(
                    fmt::format("({} lines are missing here: they waited too long to be written)\n", gap.mapped()));
            entry.target->append(entry.lines);
        }
        lock.lock();
        state.writing = false;
        state.changed.notify_all();
    }
}

bool LogWriter::flush() const {
    std::unique_lock lock{state_->mutex};
    return state_->flush(lock);
}

bool LogWriter::end() {
    std::unique_lock lock{state_->mutex};
    if (thread_.joinable()) (void)state_->flush(lock);
    state_->ending = true;  // under the same lock: no other line can make the thread write again
    state_->waiting.clear();
    state_->saves.clear();
    state_->changed.notify_all();
    const bool hangs = state_->writing;
    std::thread thread = std::move(thread_);
    lock.unlock();
    if (thread.joinable()) hangs ? thread.detach() : thread.join();
    return !hangs;
}

std::uint64_t LogWriter::lost() const {
    const std::lock_guard lock{state_->mutex};
    return state_->lost;
}

}  // namespace bulkhead::supervisor
