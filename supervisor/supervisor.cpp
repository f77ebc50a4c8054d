#include "supervisor/supervisor.h"

#include <unistd.h>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/limits.h"
#include "supervisor/proc_files.h"

namespace bulkhead::supervisor {

Supervisor::Supervisor(Options options) : options_{std::move(options)}, keeper_{io_, std::move(options_.keeper_link)} {}

int Supervisor::run() {
    keeper_.start(
        {[this](const keeper_link::KeeperHello& hello) { on_keeper_ready(hello); },
         [this] {
             spdlog::info("the keeper was asked to stop");
             stop_asked_ = true;
             if (fleet_) stop([](const std::vector<Receipt>&) {});
         },
         [] { spdlog::warn("the keeper was asked to reload: restart the daemon to apply a changed fleet file"); },
         [this](const Error* why) {
             if (!ending_) {
                 spdlog::error("the link to the keeper ended{}{}", why != nullptr ? ": " : "",
                               why != nullptr ? why->text() : "");
                 status_ = 1;
             }
             io_.stop();
         }});
    io_.run();
    return status_;
}

void Supervisor::on_keeper_ready(const keeper_link::KeeperHello& hello) {
    context_.emplace(FleetContext{io_, keeper_, off_loop_, gpus_, events_, {}, nullptr, 0, 0, {}, {}});
    context_->station = {options_.worker_program, daemon_token(hello.keeper_pid, hello.started_unix_ms),
                         options_.socket, options_.cache, std::move(options_.inherited)};
    context_->generation_last = hello.generation_last;
    context_->ended_with_supervisor = keeper_.ended_with_supervisor();
    context_->channel_last = hello.supervisor_starts << 32U;
    facts_.version = BULKHEAD_VERSION;
    facts_.keeper_pid = hello.keeper_pid;
    facts_.supervisor_pid = ::getpid();
    facts_.socket = options_.socket;
    facts_.fleet_file = options_.fleet.source.string();
    facts_.started_unix_ms = static_cast<std::int64_t>(hello.started_unix_ms);

    // Whatever a former daemon on this socket left behind would hold the memory that this fleet needs.
    off_loop_.run([socket = options_.socket] { return kill_leftovers(socket); },
                  [this](const std::vector<std::string>& killed) {
                      for (const auto& process : killed) spdlog::warn("killed {}, left behind on this socket", process);
                      begin();
                  });
}

void Supervisor::begin() {
    context_->cgroups = Cgroups::make(static_cast<pid_t>(facts_.keeper_pid));
    facts_.containment =
        context_->cgroups ? "cgroup " + context_->cgroups->path().string() : "process group and marker";
    fleet_.emplace(*context_, options_.fleet, options_.log_folder);
    daemon_.emplace(Daemon{*fleet_, facts_, [this](auto stopped) { stop(std::move(stopped)); }});
    server_.emplace(io_, std::move(options_.listener), make_methods(*daemon_));
    spdlog::info("supervisor {} pid={} keeper_pid={} fleet={} models={} containment=\"{}\" socket={}", facts_.version,
                 facts_.supervisor_pid, facts_.keeper_pid, facts_.fleet_file, options_.fleet.models.size(),
                 facts_.containment, facts_.socket);
    if (stop_asked_) return stop([](const std::vector<Receipt>&) {});
    server_->start();
    fleet_->preload();
}

void Supervisor::stop(std::function<void(std::vector<Receipt>)> stopped) {
    fleet_->stop([this, stopped = std::move(stopped)](std::vector<Receipt> receipts) {
        stopped(std::move(receipts));
        end();
    });
}

void Supervisor::end() {
    if (std::exchange(ending_, true)) return;
    server_->finish([this] {
        spdlog::info("stopped");
        keeper_.stop();
        end_by_ = Deadline::Clock::now() + limits::control_flush_deadline;
        end_when_flushed();
    });
}

/// A keeper that does not read its link for so long will not miss the word either.
void Supervisor::end_when_flushed() {
    if (keeper_.is_flushed() || Deadline::Clock::now() >= end_by_) return io_.stop();
    end_check_.arm(limits::settle_poll, [this] { end_when_flushed(); });
}

}  // namespace bulkhead::supervisor
