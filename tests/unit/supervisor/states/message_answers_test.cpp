/// What a replica does with each message of its worker in each state.

#include "supervisor/states/message_answers.h"

#include <fcntl.h>

#include <array>
#include <cctype>
#include <memory>
#include <sstream>
#include <string>

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include "tests/unit/supervisor/scenario.h"

namespace bulkhead::supervisor {
namespace {

/// How a replica gets into each state, in the order of WorkerState.
constexpr std::array<const char*, worker_state_count> ways{
    "",
    "load; loading; dies; adopts",
    "load; spawned; declared",
    "load; loading",
    "load; loading; says progress phase=capturing; state capturing",
    "ready",
    "ready; says busy; state busy",
    "ready; unload; got drain",
    "obeys; ready; unload; got drain; says drained; state stopping",
    // Then it exits: see Cell.
    "obeys; ready; unload; got drain; says drained; state stopping; hold",
    "obeys; ready; overruns; state crashed",
    "ready; exits SIGSEGV; ready 2; exits SIGSEGV; state backoff",
    "load; loading; says failed code=package_incompatible; exits 78; state quarantined"};

struct Row {
    std::string_view packet;
    /// For each state: '.' ignored, '!' complained about, '+' taken, or the initial of the
    /// state it leads to.
    std::string_view in_state;
};

constexpr std::size_t row_count = std::size(message_answers);
// clang-format off
constexpr std::array<Row, row_count> rows{{
    // stopped, adopting, spawning, loading, capturing, ready, busy, draining, stopping,
    // reclaiming, crashed, ...
    // The members of hello: see Cell.
    //                                                                  saslcrbdsrcbq
    {R"({"type": "hello"})",                                           ".RL!!!!!!!!.."},
    {R"({"type": "progress", "done": 77})",                            "...++........"},
    {R"({"type": "grant_asked"})",                                     "..+++!!!!!!.."},
    {R"({"type": "ready"})",                                           ".+!RR!!!!!!.."},
    {R"({"type": "failed", "code": "load_failed", "attempt": "it"})",  ".CCCC........"},
    {R"({"type": "channel_opened", "channel": 7})",                    "..+++++++++.."},
    {R"({"type": "channel_closed", "channel": 7})",                    "..+++++++++.."},
    {R"({"type": "channel_refused", "channel": 7})",                   "..+++++++++.."},
    {R"({"type": "busy"})",                                            ".....B......."},
    {R"({"type": "idle"})",                                            "......R......"},
    {R"({"type": "statistics", "requests": 77})",                      ".++++++++++.."},
    {R"({"type": "overrun"})",                                         ".CCCCCCC....."},
    {R"({"type": "drained"})",                                         ".S!!!!!S!!!.."},
    {R"({"type": "dying", "signal": 7})",                              ".CCCCCCC+++.."},
    {R"({"type": "backtrace", "signal": 7, "frames": ["f+0x1"]})",     ".++++++++++.."},
    {R"({"type": "unknown"})",                                         "..+++++++++.."},
}};
// clang-format on

/// A replica in one state, and one message to it.
class Cell : public test::Scenario {
public:
    explicit Cell(WorkerState state) : Scenario{ways[static_cast<std::size_t>(state)]}, state_{state} {}

    /// What the replica did, as in `Row`.
    char answer_to(std::string_view packet, const std::ostringstream& log) {
        TestBody();
        if (state_ == WorkerState::reclaiming) {  // a child of the process has its link still
            UniqueFd end{::fcntl(keeper_.latest().link.get(), F_DUPFD_CLOEXEC, 0)};
            keeper_.exit(keeper_.latest(), {false, 0, true});
            wait_for(state_);
            keeper_.latest().link = std::move(end);
        }
        EXPECT_EQ(replica().state(), state_);
        const auto process = replica().process();
        if (!process) return '.';  // nobody is there who says it
        worker_link::Hello with_channel;
        with_channel.channels = {7};
        process->messages.take_channels(with_channel);

        say(packet);
        process->messages.receive_waiting();

        const std::string type{json::parse(packet).at("type").as_string()};
        if (log.str().find(fmt::format("{}, while it was {}", type, to_string(state_))) != std::string::npos)
            return '!';
        if (replica().state() != state_)
            return static_cast<char>(std::toupper(static_cast<unsigned char>(to_string(replica().state()).front())));
        return is_taken(type, *process, log.str()) ? '+' : '.';
    }

private:
    void say(std::string_view packet) {
        if (!packet.starts_with(R"({"type": "hello")")) return keeper_.latest().say_text(packet);
        state_ == WorkerState::adopting ? answer(keeper_.latest(), "ready") : keeper_.latest().hello();
    }
    /// Whether the replica did what a message asks for that does not change its state.
    bool is_taken(const std::string& type, const WorkerProcess& process, const std::string& log) {
        const auto logged = [&](const char* text) { return log.find(text) != std::string::npos; };
        if (type == "progress") return process.load.progress().done == 77;
        if (type == "grant_asked") return keeper_.latest().got("grant");
        if (type == "ready") return process.ready_at && state_ == WorkerState::adopting;
        if (type == "channel_opened") return logged("channel=7 answered its client");
        if (type == "channel_closed" || type == "channel_refused") return process.messages.channels() == 0;
        if (type == "statistics") return process.statistics.requests == 77;
        if (type == "dying") return process.end.evidence.report.signal == 7;
        if (type == "backtrace") return !process.end.evidence.report.backtrace.empty();
        if (type == "unknown") return logged("a packet of type");
        return false;
    }

    const WorkerState state_;
};

TEST(MessageAnswers, EachMessageInEachStateIsAnsweredAsTheTableSays) {
    std::ostringstream log;
    const auto before = spdlog::default_logger();
    const auto logger = std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log));
    logger->set_level(spdlog::level::debug);
    spdlog::set_default_logger(logger);
    for (std::size_t message = 0; message < row_count; ++message) {
        const auto& [packet, expected] = rows[message];
        std::string in_state;
        for (std::size_t state = 0; state < worker_state_count; ++state) {
            Cell cell{static_cast<WorkerState>(state)};
            log.str("");
            in_state += cell.answer_to(packet, log);
        }
        EXPECT_EQ(in_state, expected) << packet;

        for (char& one : in_state) one = std::isupper(static_cast<unsigned char>(one)) != 0 ? '+' : one;
        EXPECT_EQ(in_state, message_answers[message].in_state) << packet;
    }
    spdlog::set_default_logger(before);
}

}  // namespace
}  // namespace bulkhead::supervisor
