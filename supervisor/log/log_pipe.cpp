#include "supervisor/log/log_pipe.h"

#include <array>
#include <cerrno>
#include <utility>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

LogPipe::LogPipe(boost::asio::io_context& io, UniqueFd pipe, const WorkerName& worker, ModelLog& log, Heard heard)
    : pipe_{io, pipe.release()}, mark_{io}, log_{log},
      emit_{[this, replica = worker.replica, generation = worker.generation, heard = std::move(heard)](
                std::string text, bool by_daemon) {
          if (heard && !by_daemon) heard(text);
          log_.append({unix_ms(), replica, generation, by_daemon, std::move(text)});
      }} {
    boost::system::error_code ignored;
    pipe_.native_non_blocking(true, ignored);
}

std::shared_ptr<LogPipe> LogPipe::open(boost::asio::io_context& io, UniqueFd pipe, const WorkerName& worker,
                                       ModelLog& log, Heard heard) {
    const std::shared_ptr<LogPipe> self{new LogPipe{io, std::move(pipe), worker, log, std::move(heard)}};
    self->wait_readable();
    return self;
}

void LogPipe::wait_readable() {
    pipe_.async_wait(boost::asio::posix::descriptor_base::wait_read,
                     [self = shared_from_this()](boost::system::error_code ec) {
                         if (ec || !self->pipe_.is_open()) return;
                         if (self->read_some()) return self->wait_readable();
                         self->finish();
                     });
}

bool LogPipe::read_some() {
    std::array<char, limits::log_read_bytes> buffer;
    for (std::size_t i = 0; i < limits::log_reads_per_turn; ++i) {
        const ssize_t count = ::read(pipe_.native_handle(), buffer.data(), buffer.size());
        if (count < 0) {
            const bool goes_on = errno == EAGAIN || errno == EINTR;
            arm_mark();
            return goes_on;
        }
        if (count == 0) return false;
        splitter_.feed({buffer.data(), static_cast<std::size_t>(count)}, LineSplitter::Clock::now(), emit_);
    }
    arm_mark();
    return true;
}

void LogPipe::arm_mark() {
    const auto due = splitter_.mark_due();
    if (!due) return mark_.cancel();
    mark_.arm_until(*due, [this] { splitter_.end_window(emit_); });
}

void LogPipe::finish() {
    if (!pipe_.is_open()) return;
    read_some();
    mark_.cancel();
    splitter_.finish(emit_);
    boost::system::error_code ignored;
    pipe_.close(ignored);
}

}  // namespace bulkhead::supervisor
