#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/base/packet_link.h"
#include "supervisor/log/log_pipe.h"
#include "supervisor/states/hang_watch.h"
#include "supervisor/worker_link/death_watch.h"
#include "supervisor/worker_link/worker_link.h"

namespace bulkhead::supervisor {

struct WorkerProcess;

struct Client {
    std::string name;  ///< for logs
    std::int64_t pid = 0;
    std::int64_t uid = 0;
    std::uint64_t connection = 0;  ///< number of its control connection
};

/// The client's end of a channel; the worker has the other end.
struct OpenedChannel {
    std::uint64_t id = 0;
    WorkerName worker;
    pid_t pid = 0;
    UniqueFd client_end;
};

/// Everything by which one worker speaks: its link, its output, its page, and the supervisor's
/// duplicates of its ends of channels. states/message_answers.h says what is taken in which state.
/// Thread  the loop
class WorkerMessages {
public:
    explicit WorkerMessages(WorkerProcess& process) : process_{process} {}

    /// Without a descriptor, there is none.
    void open(UniqueFd link, UniqueFd output);
    void send(const worker_link::packets::ToWorker& message, std::vector<UniqueFd> fds = {}) const;
    /// Handles packets that have already arrived.
    void receive_waiting();
    /// Reads the rest of its output.
    void finish_output();
    void close();
    [[nodiscard]] std::uint64_t ignored_frames() const { return link_ ? link_->ignored_frames() : 0; }

    /// Takes what was sent with a hello besides channels.
    void take_descriptors(worker_link::Hello& hello);
    /// Takes its ends of channels, which follow the page in the order of `hello.channels`. For a
    /// channel without a descriptor, only the kernel tells the client of the death.
    void take_channels(worker_link::Hello& hello);
    /// Makes the configuration for this worker.
    /// Errors  protocol_violation: another worker, or another release; config_invalid: too long
    [[nodiscard]] std::optional<Error> prepare(const worker_link::Hello& hello);
    /// Sends the configuration once it was made.
    void configure();

    [[nodiscard]] std::size_t channels() const { return channels_.size(); }
    /// `attempt`: begins each error.
    [[nodiscard]] Result<OpenedChannel> open_channel(const Client& client, const std::string& attempt);
    /// Gives clients of all its channels their end of file now.
    void cut_channels();

    /// Null if the worker has no page.
    [[nodiscard]] const WorkerPageView* page() const { return page_.get(); }
    /// Reads the worker's page.
    [[nodiscard]] std::optional<HangWatch::Reading> reading() const;
    /// Logs that a message was ignored.
    void complain(const std::string& what);

private:
    void on_packet(Packet& packet);
    void dispatch(worker_link::Message& message);
    void take(worker_link::Message& message);
    void take_refusal(std::uint64_t channel, const Error& why);
    void take_page(const UniqueFd& memfd);
    void take_fault(UniqueFd pipe);
    void on_main_thread_ended();

    WorkerProcess& process_;
    std::shared_ptr<PacketLink> link_;
    std::shared_ptr<LogPipe> output_;
    std::shared_ptr<LogPipe> fault_;  ///< output of Python's `faulthandler`; null for other workers
    std::shared_ptr<const WorkerPageView> page_;
    std::shared_ptr<DeathWatch::Watch> death_watch_;
    /// Shut down at the first sign of its death: clients get their end of file at once, not after
    /// the kernel has torn down gigabytes.
    std::map<std::uint64_t, UniqueFd> channels_;
    std::string configuration_;  ///< until it is sent
    std::uint32_t complaints_ = 0;
};

}  // namespace bulkhead::supervisor
