#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>

#include "worker/channel/channel_session.h"
#include "worker/generation/request_limits.h"
#include "worker/link/grant.h"
#include "worker/link/identity.h"
#include "worker/link/link.h"
#include "worker/link/load_progress.h"
#include "worker/loop/executor.h"
#include "worker/loop/limits.h"
#include "worker/loop/status_page.h"
#include "worker/requests/dispatcher.h"
#include "worker/slabs/gpu_jobs.h"

namespace bulkhead::worker {

/// What a worker needs from outside its event loop.
struct ServerOptions {
    Identity identity;            ///< until the worker is configured, which may change it
    std::filesystem::path cache;  ///< $BULKHEAD_CACHE
    std::function<Result<std::unique_ptr<Model>>(const config::ModelSpec&, const LoadContext&)> load;
    std::string torch_version;
    StatusPage* page = nullptr;  ///< null if there is none; outlives the server
    std::chrono::milliseconds hello_deadline = limits::hello_deadline;
    std::chrono::milliseconds unread_stream = generation::limits::unread_stream;
    /// Ends the process at once. If it returns, as in a test, the server does nothing more.
    std::function<void(int status)> exit;
};

/// A worker: the daemon's link, one model, and the clients that use it.
///
/// Thread  the event loop of `io`, which the executor's two threads run in turns: it answers even
///         while the model loads or runs
class Server final : private SessionHost {
public:
    Server(boost::asio::io_context& io, UniqueFd link, ServerOptions options);
    ~Server() override;

    /// Sends a hello and runs the event loop until it is stopped. The caller's thread is the
    /// executor's cover.
    void run();
    /// Accepts nothing new, finishes requests in flight, sends `drained` and exits 0; exits 1 if
    /// the deadline passes first. Of two calls, the earlier deadline counts.
    void drain(std::chrono::milliseconds deadline);

private:
    enum class Phase : std::uint8_t { starting, loading, ready, draining, ended };

    void on_link(worker_link::Configure message);
    void on_link(worker_link::Grant /*message*/) { grant_.give(); }
    void on_link(ChannelMessage message);
    void on_link(worker_link::Drain message) { drain(std::chrono::milliseconds{message.deadline_ms}); }
    void on_link(worker_link::StatisticsAsked /*message*/) { say_statistics(); }
    void on_link(worker_link::HelloAsked message);
    [[nodiscard]] HelloPacket hello(bool with_descriptors) const;
    [[nodiscard]] worker_link::Ready readiness() const;
    [[nodiscard]] std::string_view phase_name() const;
    void say_activity();
    void say_statistics();

    void load(bool cuda);
    void loaded(Result<std::unique_ptr<Model>> model);
    void fail_load(const Error& error);
    void finish_drain_if_done();
    [[nodiscard]] std::vector<worker_link::Importer> gpu_importers() const;
    void leave(int status);

    void hello_came(ChannelSession& session) override;
    void opened(ChannelSession& session) override { link_.send(worker_link::ChannelOpened{session.id()}); }
    void refused(ChannelSession& session, const Error& error) override;
    void flushed() override { finish_drain_if_done(); }
    void ended(ChannelSession& session, bool was_refused) override;
    void reclaimed(std::uint64_t channel, bool was_refused);
    /// For a stateful model; false: refused, or waiting.
    [[nodiscard]] bool take_state(ChannelSession& session);

    boost::asio::io_context& io_;
    const ServerOptions options_;
    Identity identity_;
    Phase phase_ = Phase::starting;
    std::array<std::byte, packet_bytes_max> receive_buffer_;
    WorkerLink link_;

    config::ModelSpec spec_;
    Clock::time_point load_started_;
    std::chrono::milliseconds load_time_{0};
    std::shared_ptr<LoadProgress> progress_;
    std::atomic<bool> capturing_ = false;  ///< set by the loading thread
    Grant grant_;
    bool statistics_owed_ = false;        ///< requested while the peer did not read
    std::optional<std::uint64_t> nonce_;  ///< of the last `hello_asked`
    std::unique_ptr<Model> model_;        ///< set once, when ready
    boost::json::object methods_;

    Executor executor_;
    Dispatcher dispatcher_;
    std::optional<GpuJobs> gpu_jobs_;  ///< set once ready, like the next
    std::optional<SessionContext> context_;
    std::map<std::uint64_t, std::shared_ptr<ChannelSession>> sessions_;
    std::uint64_t ignored_frames_past_ = 0;  ///< empty packets on ended channels
    std::optional<std::uint64_t> holder_;    ///< the channel that has a stateful model's state
    std::optional<std::uint64_t> waiting_;   ///< gets the state once the holder, which has
                                             ///< gone, is reclaimed
    Clock::time_point drain_until_ = Clock::time_point::max();
    Alarm drain_deadline_;
    std::optional<Clock::time_point> importers_until_;  ///< set once a drain waits only for them
    Alarm importers_deadline_;
};

}  // namespace bulkhead::worker
