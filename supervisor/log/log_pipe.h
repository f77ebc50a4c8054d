#pragma once

#include <functional>
#include <memory>
#include <string>

#include <boost/asio/posix/stream_descriptor.hpp>

#include "supervisor/base/deadline.h"
#include "supervisor/base/line_splitter.h"
#include "supervisor/base/worker_name.h"
#include "supervisor/log/model_log.h"

namespace bulkhead::supervisor {

/// Reads a worker's output as fast as it prints, and passes the lines to its model's log.
class LogPipe : public std::enable_shared_from_this<LogPipe> {
public:
    /// Called with each line that the worker printed, before the log has it.
    using Heard = std::function<void(const std::string& line)>;

    /// `log` must outlive the loop.
    static std::shared_ptr<LogPipe> open(boost::asio::io_context& io, UniqueFd pipe, const WorkerName& worker,
                                         ModelLog& log, Heard heard = {});

    /// The worker is dead: reads the rest of the pipe and closes it, even if a grandchild
    /// holds it open.
    void finish();

private:
    LogPipe(boost::asio::io_context& io, UniqueFd pipe, const WorkerName& worker, ModelLog& log, Heard heard);
    void wait_readable();
    /// Returns false at the end of file.
    bool read_some();

    void arm_mark();

    boost::asio::posix::stream_descriptor pipe_;
    Deadline mark_;  ///< reports dropped lines if nothing follows a burst
    ModelLog& log_;
    LineSplitter splitter_;
    LineSplitter::Emit emit_;
};

}  // namespace bulkhead::supervisor
