#include "worker/server/server.h"

#include <unistd.h>

#include <algorithm>
#include <exception>

#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "worker/death/exit_status.h"
#include "worker/loop/handler_lock.h"
#include "worker/model/describe.h"

namespace bulkhead::worker {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

/// Requests in flight per channel. A channel may fill the queue only if it is the only one.
/// `slots`: a generating model's sequences, which run beside the queue.
std::uint32_t channel_in_flight_max(const config::ModelSpec& spec, std::uint32_t slots) {
    const bool alone = spec.state == config::StateScope::channel || spec.channel.channels_max == 1;
    return std::min(limits::channel_in_flight_max, slots + (alone ? spec.queue_bound : (spec.queue_bound + 1) / 2));
}

Error draining_error() {
    return Error{ErrorCode::worker_draining, "opening a channel to a worker that is draining",
                 "open the channel again: it leads to the model's next worker"};
}

}  // namespace

Server::Server(boost::asio::io_context& io, UniqueFd link, ServerOptions options)
    : io_{io}, options_{std::move(options)}, identity_{options_.identity},
      link_{io,
            std::move(link),
            receive_buffer_,
            {.message =
                 [this](LinkMessage message) {
                     if (phase_ != Phase::ended)
                         std::visit([this](auto& content) { on_link(std::move(content)); }, message);
                 },
             .lost = [this] { leave(1); },
             .hello = [this](bool with_descriptors) { return hello(with_descriptors); },
             .caught_up =
                 [this] {
                     say_activity();
                     if (statistics_owed_) say_statistics();
                 }}},
      executor_{io}, dispatcher_{io,
                                 executor_,
                                 options_.page,
                                 {.busy = [this] { say_activity(); },
                                  .idle = [this] { say_activity(); },
                                  .settled = [this] { finish_drain_if_done(); },
                                  .ran_out = [this] { say_statistics(); },
                                  .overrun =
                                      [this](std::string_view method, milliseconds running) {
                                          spdlog::error("method \"{}\" runs for {} ms, its budget is {} ms", method,
                                                        running.count(), spec_.deadlines.request.count());
                                          link_.send(worker_link::Overrun{
                                              .method = std::string{method},
                                              .running_ms = static_cast<std::uint64_t>(running.count()),
                                              .budget_ms =
                                                  static_cast<std::uint64_t>(spec_.deadlines.request.count())});
                                      }}},
      drain_deadline_{io,
                      [this] {
                          spdlog::warn("the drain deadline passed with {} requests in flight", dispatcher_.in_flight());
                          dispatcher_.fail_all(Error{ErrorCode::worker_draining,
                                                     "the worker ended before the request did",
                                                     "send the request again: it goes to the model's next worker"});
                          leave(1);
                          return never;
                      }},
      importers_deadline_{io, [this] {
                              finish_drain_if_done();
                              return never;
                          }} {}

Server::~Server() {
    grant_.give_up();
    executor_.stop();  // before destroying the members that its job uses
    if (progress_) progress_->finish();
}

void Server::run() {
    link_.say_hello();
    executor_.run();
}

std::string_view Server::phase_name() const {
    switch (phase_) {
    case Phase::starting: return "starting";
    case Phase::loading: return capturing_ ? "capturing" : "loading";
    case Phase::ready: return "ready";
    case Phase::draining:
    case Phase::ended: break;
    }
    return "draining";
}

HelloPacket Server::hello(bool with_descriptors) const {
    const bool page = with_descriptors && options_.page != nullptr;
    std::vector<int> fds;
    if (page) fds.push_back(options_.page->fd());
    worker_link::Hello message{.protocol = {worker_link::version, worker_link::version},
                               .model = identity_.model,
                               .replica = identity_.replica,
                               .generation = identity_.generation,
                               .pid = ::getpid(),
                               .state = {.configured = phase_ != Phase::starting,
                                         .phase = std::string{phase_name()},
                                         .in_flight = dispatcher_.in_flight(),
                                         .grant = std::string{grant_.name()}},
                               .nonce = nonce_};
    if (page) message.page = true;
    for (const auto& [id, session] : sessions_) {
        if (session->is_closed()) continue;
        message.channels.push_back(id);
        if (with_descriptors && fds.size() < packet_fds_kernel_max) fds.push_back(session->descriptor());
    }
    if (model_) message.loaded = readiness();
    boost::json::object packet = worker_link::to_json(message);
    // A great many methods and buckets do not fit. The buckets' counters can be asked for later.
    if (model_ && boost::json::serialize(packet).size() > packet_bytes_max)
        packet["loaded"].as_object()["graphs"] = boost::json::object{};
    return {std::move(packet), std::move(fds)};
}

worker_link::Ready Server::readiness() const {
    return {.load_ms = static_cast<std::uint64_t>(load_time_.count()),
            .methods = methods_,
            .torch = options_.torch_version,
            .device = model_->device_name(),
            .graphs = model_->graphs()};
}

void Server::say_activity() {
    if (phase_ != Phase::ready && phase_ != Phase::draining) return;
    if (dispatcher_.busy())
        link_.send(worker_link::Busy{dispatcher_.in_flight()});
    else
        link_.send(worker_link::Idle{});
}

void Server::on_link(worker_link::Configure message) {
    if (phase_ != Phase::starting) return spdlog::warn("ignored: a second configure");
    Result<config::ModelSpec> spec = read_configuration(message);
    if (!spec) return fail_load(spec.error());
    spec_ = std::move(*spec);
    identity_ = {identity_.daemon_token, spec_.name, message.replica.value_or(identity_.replica),
                 message.generation.value_or(identity_.generation)};
    spdlog::set_level(spdlog::level::from_str(std::string{config::word_of(spec_.log_level)}));
    phase_ = Phase::loading;
    load(message.device == "cuda");
}

void Server::load(bool cuda) {
    load_started_ = Clock::now();
    progress_ = std::make_shared<LoadProgress>(io_, [this](const LoadProgress::Step& step) { link_.send(step); });
    LoadContext context{
        .cache = options_.cache,
        .cuda = cuda,
        .progress =
            [this](std::string_view phase, std::uint64_t done, std::uint64_t total, std::string_view unit,
                   std::string_view detail) {
                capturing_ = phase == "capturing";
                if (options_.page != nullptr) options_.page->step(fmt::format("{} {}", phase, detail));
                progress_->update({std::string{phase}, done, total, std::string{unit}, std::string{detail}});
            },
        .wait_for_grant =
            [this](std::uint64_t device_bytes) {
                boost::asio::post(io_, HandlerLock::of(io_).wrap([this, device_bytes] {
                    grant_.ask();
                    link_.send(worker_link::GrantAsked{device_bytes});
                }));
                return grant_.wait();
            }};
    executor_.post([this, context = std::move(context)] {
        const auto model = std::make_shared<Result<std::unique_ptr<Model>>>([&]() -> Result<std::unique_ptr<Model>> {
            const RunningMark mark{options_.page, load_started_, "loading"};
            try {
                return options_.load(spec_, context);
            } catch (const std::exception& exception) {
                return Error{
                    ErrorCode::load_failed, fmt::format("loading {}: {}", spec_.file.string(), exception.what()), {}};
            }
        }());
        return [this, model] { loaded(std::move(*model)); };
    });
}

void Server::loaded(Result<std::unique_ptr<Model>> model) {
    if (phase_ != Phase::loading) return;
    progress_->finish();
    if (!model) return fail_load(model.error());
    methods_ = describe_methods((*model)->methods());
    if (generation::Engine* const engine = (*model)->generator(); engine != nullptr)
        for (auto& [name, description] : generation::describe(generation::Method{engine->shape()}, spec_.file.string()))
            methods_[name] = std::move(description);
    if (const std::size_t bytes = boost::json::serialize(methods_).size(); bytes > wire::json_bytes_max)
        return fail_load(
            Error{ErrorCode::config_invalid, fmt::format("describing the methods takes {} bytes", bytes),
                  fmt::format("declare fewer methods or shorter names: at most {} bytes", wire::json_bytes_max)});
    model_ = std::move(*model);
    dispatcher_.serve(*model_, spec_);
    const generation::Engine* const generator = model_->generator();
    const std::uint32_t in_flight_max =
        channel_in_flight_max(spec_, generator != nullptr ? generator->shape().slots : 0);
    const milliseconds gpu_deadline = spec_.deadlines.request + limits::overrun_grace;
    gpu_jobs_.emplace(io_, executor_, options_.page, gpu_deadline, [this](const Error& error) {
        spdlog::critical("{}", error.text());
        leave(1);
    });
    context_.emplace(SessionContext{io_, receive_buffer_, executor_, dispatcher_, options_.page, identity_, spec_,
                                    *model_, methods_, in_flight_max, options_.hello_deadline, options_.unread_stream,
                                    std::make_shared<SlabBudget>(spec_.channel.worker_bytes_max), *gpu_jobs_});
    phase_ = Phase::ready;
    load_time_ = duration_cast<milliseconds>(Clock::now() - load_started_);
    spdlog::info("ready after {} ms on {}", load_time_.count(), model_->device_name());
    link_.send(readiness());
}

void Server::fail_load(const Error& error) {
    spdlog::error("{}", error.text());
    link_.send(failed(error));
    leave(exit_status_of(error, spec_));
}

void Server::on_link(worker_link::HelloAsked message) {
    nonce_ = message.nonce;
    link_.say_hello();
}

void Server::say_statistics() {
    std::uint64_t slab_bytes = 0;
    std::uint64_t ignored_frames = ignored_frames_past_;
    for (const auto& [id, session] : sessions_) {
        slab_bytes += session->slab_bytes();
        ignored_frames += session->ignored_frames();
    }
    worker_link::Statistics statistics{.requests = dispatcher_.requests(),
                                       .errors = dispatcher_.errors(),
                                       .out_of_memory = dispatcher_.out_of_memory(),
                                       .in_flight = dispatcher_.in_flight(),
                                       .queued = dispatcher_.queued(),
                                       .channels = sessions_.size(),
                                       .ignored_frames = ignored_frames,
                                       .graphs = model_ ? model_->graphs() : boost::json::object{},
                                       .slabs = {slab_bytes},
                                       .importers = gpu_importers()};
    if (dispatcher_.steps() != nullptr) statistics.generation = dispatcher_.steps()->statistics();
    if (!dispatcher_.durations().empty()) statistics.request_ms = dispatcher_.durations().object();
    statistics_owed_ = !link_.send(std::move(statistics));
}

void Server::on_link(ChannelMessage message) {
    const auto refuse_at_once = [&](const Error& error) {
        (void)send_packet(message.socket.get(), channel::encode(channel::Failure{0, error}));
        link_.send(channel_refused(message.channel, error));
    };
    if (!message.socket)
        return refuse_at_once({ErrorCode::resources_exhausted, "opening a channel: the worker has no free descriptor",
                               "close channels, or raise the limit on open files (ulimit -n) of the daemon"});
    if (phase_ == Phase::starting || phase_ == Phase::loading)
        return refuse_at_once({ErrorCode::model_loading, "opening a channel to a worker that is not ready",
                               "open the channel again when the model is ready"});
    if (sessions_.contains(message.channel))
        return refuse_at_once(
            {ErrorCode::protocol_violation, fmt::format("channel number {} is in use", message.channel), {}});
    if (sessions_.size() >= spec_.channel.channels_max + limits::refusals_pending_max)
        return refuse_at_once({ErrorCode::resources_exhausted,
                               "opening a channel while very many others are being opened",
                               "open the channel again later"});
    // Its hello decides the rest: the client could miss an earlier answer.
    auto session = std::make_shared<ChannelSession>(*context_, static_cast<SessionHost&>(*this), message);
    sessions_.emplace(message.channel, session);
    session->start(std::move(message.socket));
}

void Server::hello_came(ChannelSession& session) {
    if (phase_ != Phase::ready) return session.refuse(draining_error());
    const auto in_use = static_cast<std::size_t>(std::ranges::count_if(sessions_, [](const auto& entry) {
        return entry.second->state() == ChannelSession::State::opening || entry.second->is_open();
    }));
    if (in_use >= spec_.channel.channels_max)
        return session.refuse({ErrorCode::resources_exhausted,
                               fmt::format("opening a channel, and {} are open", in_use),
                               "close one, or raise `channel.count` of the model"});
    if (spec_.state == config::StateScope::channel && !take_state(session)) return;
    session.open();
}

bool Server::take_state(ChannelSession& session) {
    // The former client's end of file may still be unread.
    const auto is_gone = [this](std::uint64_t channel) {
        const auto found = sessions_.find(channel);
        if (found == sessions_.end()) return true;
        const std::shared_ptr<ChannelSession> other = found->second;
        if (other->peer_is_gone()) other->close("its client is gone");
        return other->is_closed();
    };
    if (!holder_) {
        holder_ = session.id();
        return true;
    }
    if (is_gone(*holder_) && (!waiting_ || is_gone(*waiting_))) {
        waiting_ = session.id();  // until the holder's memory and running request are gone
        return false;
    }
    session.refuse({ErrorCode::busy,
                    fmt::format("opening a channel to \"{}\", which keeps state and serves one channel at a time; "
                                "channel {} has it",
                                spec_.name, waiting_.value_or(*holder_)),
                    "wait until that channel is closed, or raise `replicas` of the model"});
    return false;
}

void Server::refused(ChannelSession& session, const Error& error) {
    spdlog::info("channel {} refused: {}", session.id(), error.text());
    link_.send(channel_refused(session.id(), error));
}

void Server::ended(ChannelSession& session, bool was_refused) {
    const std::uint64_t channel = session.id();
    // On the executor: only it may call the device, and unmapping takes long.
    executor_.post([this, channel, was_refused, slabs = session.give_up_slabs()]() mutable {
        slabs->unregister_from(*model_);
        slabs.reset();
        return [this, channel, was_refused] { reclaimed(channel, was_refused); };
    });
}

void Server::reclaimed(std::uint64_t channel, bool was_refused) {
    if (const auto found = sessions_.find(channel); found != sessions_.end()) {
        ignored_frames_past_ += found->second->ignored_frames();
        sessions_.erase(found);
    }
    if (!was_refused) link_.send(worker_link::ChannelClosed{channel});
    finish_drain_if_done();  // an ending client releases device memory
    if (waiting_ == channel) waiting_.reset();
    if (holder_ != channel) return;
    holder_.reset();
    if (!waiting_) return;
    const auto next = sessions_.find(*std::exchange(waiting_, std::nullopt));
    if (next != sessions_.end() && next->second->state() == ChannelSession::State::hello_said)
        hello_came(*next->second);
}

void Server::drain(std::chrono::milliseconds deadline) {
    if (phase_ == Phase::ended) return;
    const Clock::time_point until = Clock::now() + deadline;
    const bool first = phase_ != Phase::draining;
    if (first) {
        spdlog::info("draining within {} ms, {} requests in flight", deadline.count(), dispatcher_.in_flight());
        phase_ = Phase::draining;
        for (const auto& [id, session] : sessions_) session->drain(deadline);
    }
    drain_until_ = std::min(drain_until_, until);
    drain_deadline_.no_later_than(drain_until_);
    finish_drain_if_done();
}

void Server::finish_drain_if_done() {
    if (phase_ != Phase::draining || dispatcher_.in_flight() > 0) return;
    for (const auto& [id, session] : sessions_)
        if (!session->is_flushed()) return;
    const auto importers = gpu_importers();
    if (!importers.empty()) {
        const Clock::time_point now = Clock::now();
        if (!importers_until_) {
            spdlog::info("waiting for {} clients that map device memory", importers.size());
            importers_until_ = now + std::min<Clock::duration>(limits::importers_let_go, (drain_until_ - now) / 2);
            importers_deadline_.no_later_than(*importers_until_);
        }
        if (now < *importers_until_) return;
    }
    say_statistics();
    link_.send(worker_link::Drained{});
    leave(0);
}

std::vector<worker_link::Importer> Server::gpu_importers() const {
    std::vector<worker_link::Importer> importers;
    for (const auto& [id, session] : sessions_)
        if (const std::uint64_t bytes = session->gpu_bytes_lent(); bytes > 0)
            importers.push_back({session->client_pid(), std::string{session->client()}, bytes});
    return importers;
}

void Server::leave(int status) {
    if (phase_ == Phase::ended) return;
    phase_ = Phase::ended;
    for (const auto& [id, session] : sessions_) {
        if (session->is_open())
            session->close("the worker ends");
        else
            session->refuse(draining_error());
    }
    link_.flush();
    options_.exit(status);
}

}  // namespace bulkhead::worker
