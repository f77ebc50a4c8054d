#include "supervisor/replica/worker_messages.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>
#include <iterator>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/base/packet.h"
#include "ipc/channel/channel_codec.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/crash/crash_report.h"
#include "supervisor/replica/replica.h"
#include "supervisor/states/message_answers.h"

namespace bulkhead::supervisor {

namespace {

template <typename... Handlers>
struct Overloaded : Handlers... {
    using Handlers::operator()...;
};

}  // namespace

static_assert(std::size(message_answers) == std::variant_size_v<worker_link::Message>);

void WorkerMessages::open(UniqueFd link, UniqueFd output) {
    if (output) output_ = LogPipe::open(process_.context.io, std::move(output), process_.name, process_.log);
    if (!link) return;
    link_ = std::make_shared<PacketLink>(process_.context.io, std::move(link));
    link_->start([this](Packet& packet) { on_packet(packet); },
                 [this](const Error* why) { process_.end.on_link_closed(why); });
}

void WorkerMessages::send(const worker_link::packets::ToWorker& message, std::vector<UniqueFd> fds) const {
    if (link_) link_->send(worker_link::packet_of(message), std::move(fds));
}

void WorkerMessages::receive_waiting() {
    if (link_) link_->receive_waiting();
}

void WorkerMessages::finish_output() {
    if (output_) output_->finish();
    if (fault_) fault_->finish();
}

void WorkerMessages::close() {
    if (link_) link_->close();
    finish_output();
    death_watch_.reset();
    page_.reset();
}

void WorkerMessages::complain(const std::string& what) {
    if (++complaints_ <= limits::link_complaints_max)
        spdlog::warn("worker={} pid={} sent a message that is ignored: {}", process_.name.text(), process_.pid,
                     escaped(what));
}

// --- channels

Result<OpenedChannel> WorkerMessages::open_channel(const Client& client, const std::string& attempt) {
    if (channels() >= process_.spec.channel.channels_max)
        return Error{ErrorCode::resources_exhausted, fmt::format("{}: {} are open", attempt, channels()),
                     "close one, or raise `channel.count` of the model"};
    auto pair = PacketPair::make();
    if (!pair) return std::move(pair.error()).during(attempt);
    UniqueFd duplicate{::fcntl(pair->second.get(), F_DUPFD_CLOEXEC, 0)};
    if (!duplicate) return system_error(attempt, errno);

    const std::uint64_t id = ++process_.context.channel_last;
    std::vector<UniqueFd> fds;
    fds.push_back(std::move(pair->second));
    send(worker_link::Channel{id, client.pid, client.uid}, std::move(fds));
    channels_.emplace(id, std::move(duplicate));
    process_.context.gate->channels_changed(*process_.owner);
    process_.watch.ask();  // the answer to `channel` depends on the client too
    spdlog::debug("worker={} channel={} client={} client_pid={} opened", process_.name.text(), id,
                  in_quotes(client.name), client.pid);
    return OpenedChannel{id, process_.name, process_.pid, std::move(pair->first)};
}

void WorkerMessages::cut_channels() {
    for (const auto& [id, end] : channels_) ::shutdown(end.get(), SHUT_RDWR);
    channels_.clear();
}

void WorkerMessages::take_channels(worker_link::Hello& hello) {
    channels_.clear();
    for (std::size_t i = 0; i < hello.channels.size() && i < process_.spec.channel.channels_max; ++i)
        channels_[hello.channels[i]] = i < hello.fds.size() ? std::move(hello.fds[i]) : UniqueFd{};
    hello.fds.clear();
}

// --- its hello

std::optional<Error> WorkerMessages::prepare(const worker_link::Hello& hello) {
    const WorkerName& name = process_.name;
    if (hello.name() != process_.born_as)
        return Error{ErrorCode::protocol_violation,
                     fmt::format("{} calls itself {}", name.text(), escaped(hello.name().text())),
                     "let only bulkheadd start workers"};
    if (!hello.speaks_our_version())
        return Error{ErrorCode::protocol_violation,
                     fmt::format("{} speaks versions {} to {} of the worker link, this daemon {} to {}", name.label(),
                                 hello.protocol[0], hello.protocol[1], worker_link::packets::version,
                                 worker_link::packets::version),
                     "install one release of all programs"};
    config::ModelSpec told = process_.spec;
    if (!process_.history.eager.empty()) told.graphs = config::Graphs::off;
    std::string configuration = worker_link::configure(told, name, process_.device.is_gpu());
    if (configuration.size() > packet_bytes_max)
        return Error{ErrorCode::config_invalid,
                     fmt::format("the declaration of {} has {} as JSON", told.name, bytes_text(configuration.size())),
                     fmt::format("declare fewer methods or buckets: {} is the most", bytes_text(packet_bytes_max))};
    configuration_ = std::move(configuration);
    return std::nullopt;
}

void WorkerMessages::configure() {
    if (!configuration_.empty()) link_->send(std::exchange(configuration_, {}));
}

void WorkerMessages::take_descriptors(worker_link::Hello& hello) {
    const auto next = [&hello](bool is_there) {
        UniqueFd first;
        if (!is_there || hello.fds.empty()) return first;
        first = std::move(hello.fds.front());
        hello.fds.erase(hello.fds.begin());
        return first;
    };
    // A later hello brings the same page and the same pipe.
    if (const UniqueFd memfd = next(hello.page.value_or(false)); memfd && !page_) take_page(memfd);
    if (UniqueFd pipe = next(hello.fault.value_or(false)); pipe && !fault_) take_fault(std::move(pipe));
}

void WorkerMessages::take_page(const UniqueFd& memfd) {
    auto page = WorkerPageView::map(memfd);
    if (!page) return complain(page.error().text());
    page_ = std::move(*page);
    death_watch_ =
        process_.context.death_watch->watch(page_, process_.while_present([this] { on_main_thread_ended(); }));
}

/// Python code cannot run in the handler of a fatal signal: `faulthandler` writes what `dying` and
/// `backtrace` say.
void WorkerMessages::take_fault(UniqueFd pipe) {
    fault_ = LogPipe::open(process_.context.io, std::move(pipe), process_.name, process_.log,
                           [this, weak = process_.weak_from_this()](const std::string& line) {
                               const auto process = weak.lock();
                               if (!process) return;
                               process->end.evidence.take_printed(line);
                               const auto signal = fatal_signal(line);
                               if (!signal || process->owner == nullptr) return;
                               worker_link::Message dying = worker_link::Dying{*signal};
                               dispatch(dying);
                           });
}

/// The first sign of most deaths: it comes before the kernel has freed the memory and
/// closed the sockets.
void WorkerMessages::on_main_thread_ended() {
    receive_waiting();  // its last packets come first: drained, failed, dying
    if (fault_) fault_->finish();
    cut_channels();
    // A draining process may have ended as requested: its exit decides.
    const WorkerState state = process_.machine.state();
    if (is_live(state) && state != WorkerState::draining) process_.end.lose(FirstSign::end, main_thread_ended);
}

std::optional<HangWatch::Reading> WorkerMessages::reading() const {
    if (!page_) return std::nullopt;
    HangWatch::Reading reading{page_->steps(), std::nullopt};
    const HangWatch::Time since{std::chrono::nanoseconds{static_cast<std::int64_t>(page_->running_since_ns())}};
    if (since > HangWatch::Time{}) reading.running_since = since;
    return reading;
}

// --- its messages

void WorkerMessages::on_packet(Packet& packet) {
    const std::string_view text{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
    auto message = worker_link::parse(text);
    if (!message) return complain(message.error().attempt);
    if (auto* hello = std::get_if<worker_link::Hello>(&*message)) hello->fds = std::move(packet.fds);
    dispatch(*message);
}

void WorkerMessages::dispatch(worker_link::Message& message) {
    const auto& [type, answers] = message_answers[message.index()];
    const WorkerState state = process_.machine.state();
    switch (answers[static_cast<std::size_t>(state)]) {
    case '+': break;
    case '!': return complain(fmt::format("{}, while it was {}", type, to_string(state)));
    default: return;
    }
    const auto alive = process_.shared_from_this();
    const std::size_t before = channels();
    take(message);
    if (process_.owner != nullptr && channels() != before) process_.context.gate->channels_changed(*process_.owner);
}

void WorkerMessages::take(worker_link::Message& message) {
    using namespace worker_link;
    StateMachine& machine = process_.machine;
    ProcessEnd& end = process_.end;
    const auto what_follows = Overloaded{
        [&](Hello& hello) { process_.owner->on_hello(hello); },
        [&](Progress& progress) {
            if (progress.phase == "capturing" && machine.can(WorkerEvent::capture_began)) {
                machine.transition(WorkerEvent::capture_began, "warmed up");
                process_.load.begin();
            }
            process_.load.take(std::move(progress));
        },
        [&](const GrantAsked&) { process_.gpu.ask(); },
        [&](Ready& ready) { process_.owner->on_ready(ready); },
        [&](const Failed& failed) { end.fail(error_of(failed)); },
        [&](const ChannelOpened& opened) {
            spdlog::debug("worker={} channel={} answered its client", process_.name.text(), opened.channel);
        },
        [&](const ChannelClosed& closed) { channels_.erase(closed.channel); },
        [&](const ChannelRefused& refused) { take_refusal(refused.channel, error_of(refused)); },
        [&](const Busy&) { machine.transition(WorkerEvent::became_busy, "a request started"); },
        [&](const Idle&) { machine.transition(WorkerEvent::became_idle, "nothing is in flight"); },
        [&](Statistics& statistics) {
            process_.statistics = std::move(statistics);
            process_.watch.answered();
            process_.context.gate->counted(*process_.owner);
        },
        [&](const Overrun& overrun) {
            const auto text = [](auto ms) { return duration_text(static_cast<std::int64_t>(ms)); };
            end.hang(
                fmt::format("{} ran {}, budget {}", overrun.method, text(overrun.running_ms), text(overrun.budget_ms)),
                fmt::format("raise deadlines.request of {}, or look for an endless loop", process_.spec.name));
        },
        [&](const Drained&) { end.on_drained(); },
        [&](const Dying& dying) { end.on_dying(dying.signal); },
        [&](Backtrace& backtrace) {
            if (!end.evidence.take(std::move(backtrace))) complain("a second backtrace");
        },
        [&](const Unknown& unknown) { complain("a packet of type \"" + unknown.type + "\""); }};
    std::visit(what_follows, message);
}

void WorkerMessages::take_refusal(std::uint64_t channel, const Error& why) {
    spdlog::info("worker={} channel={} refused: {}", process_.name.text(), channel, why.text());
    // A worker that ran out of descriptors never received its end: tell the client on the
    // duplicate kept here.
    if (const auto end = channels_.find(channel); end != channels_.end()) {
        (void)send_packet(end->second.get(), bulkhead::channel::encode(bulkhead::channel::Failure{0, why}));
        channels_.erase(end);
    }
}

}  // namespace bulkhead::supervisor
