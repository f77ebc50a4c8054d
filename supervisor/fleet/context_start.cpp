#include "supervisor/fleet/context_start.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

std::optional<std::uint64_t> bytes_of_process(const Gpu& gpu, pid_t pid) {
    if (!gpu.processes_known) return std::nullopt;
    const GpuProcess* process = gpu.find(pid);
    return process == nullptr ? 0 : process->bytes;
}

ContextStart::ContextStart(FleetContext& context, const Device& device, std::function<void()> begun)
    : context_{context}, gpu_uuid_{device.uuid}, link_{context.io}, deadline_{context.io} {
    turn_.take(context_.gpu_mutex(gpu_uuid_), std::move(begun));
}

void ContextStart::watch(const SpawnedProcess& process, OnMade made) {
    made_ = std::move(made);
    deadline_.arm(limits::blank_start_deadline, [this] {
        std::exchange(made_, nullptr)(
            Error{ErrorCode::deadline_exceeded,
                  fmt::format("it did not say hello within {}", duration_text(limits::blank_start_deadline)),
                  {}});
    });
    const int link = ::fcntl(process.link.get(), F_DUPFD_CLOEXEC, 0);
    if (link < 0) {  // fail now: the deadline would hold the turn much longer
        return deadline_.arm(Deadline::Clock::duration{}, [this, error = system_error("watching its link", errno)] {
            std::exchange(made_, nullptr)(error);
        });
    }
    link_.assign(link);
    link_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                     [this, pid = process.pid, alive = std::weak_ptr{alive_}](boost::system::error_code ec) {
                         if (!alive.expired() && !ec) read(pid);
                     });
}

void ContextStart::read(pid_t pid) {
    deadline_.cancel();
    link_.close();
    context_.off_loop.run(
        "asking what a blank holds",
        [&gpus = context_.gpus, uuid = gpu_uuid_, pid]() -> std::optional<std::uint64_t> {
            const auto gpu = gpus.read(uuid);
            return gpu ? bytes_of_process(*gpu, pid) : std::nullopt;
        },
        [this, alive = std::weak_ptr{alive_}](const Result<std::optional<std::uint64_t>>& bytes) {
            if (!alive.expired()) std::exchange(made_, nullptr)(bytes ? *bytes : std::nullopt);
        });
}

}  // namespace bulkhead::supervisor
