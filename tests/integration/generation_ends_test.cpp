// What ends a stream of tokens through the daemon, or does not: its client, its worker, an unload, a lost supervisor.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <iterator>
#include <thread>

#include "tests/integration/fixture/fleets.h"
#include "tests/integration/fixture/generation.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int long_answer = 240;
/// Far more sequences of that length than are over before a test has done what it does in their midst, and as many as a
/// channel takes.
constexpr int many = 64;

std::vector<std::uint64_t> submit_many(Channel& channel) {
    std::vector<std::uint64_t> ids;
    for (int i = 0; i < many; ++i) ids.push_back(submit(channel, prompt(i + 1), greedy(long_answer)).value());
    return ids;
}

TEST(GenerationEnds, CancellingEndsASequenceInItsMidst) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    bool was_cancelled = false;
    for (int tried = 0; !was_cancelled && tried < 100; ++tried) {  // it may be over before the word arrives
        Answered answered;
        const std::uint64_t id = submit(channel, prompt(tried + 1), greedy(long_answer)).value();
        ASSERT_TRUE(take(channel, id, answered));
        ASSERT_TRUE(channel.cancel(id));
        answered = rest_of(channel, id, answered);
        was_cancelled = answered.error.has_value();
        if (!was_cancelled) continue;
        EXPECT_EQ(answered.error->code, ErrorCode::cancelled);
        EXPECT_LT(answered.streamed.size(), static_cast<std::size_t>(long_answer));
    }
    EXPECT_TRUE(was_cancelled);
    EXPECT_FALSE(generate(channel, prompt(1), greedy(4)).error);
}

TEST(GenerationEnds, AClientThatGoesFreesItsSlotForTheNext) {
    Daemon daemon{fleet({one_by_one()})};
    {
        Channel leaving = daemon.open("tiny").value();
        const auto ids = submit_many(leaving);
        Answered first;
        ASSERT_TRUE(take(leaving, ids.front(), first));
    }
    Channel channel = daemon.open("tiny").value();

    EXPECT_FALSE(generate(channel, prompt(1), greedy(4)).error);
    EXPECT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        return row.at("channels").as_int64() == 1 && row.at("in_flight").as_int64() == 0;
    }));
    EXPECT_LT(told(daemon).at("tokens").as_int64(), many * long_answer) << "what nobody waits for is not generated";
}

TEST(GenerationEnds, AWorkerKilledInTheMidstSaysHowMuchHadCome) {
    Daemon daemon{fleet({one_by_one()})};
    int lost = 0;
    for (int tried = 1; lost == 0 && tried <= 4; ++tried) {  // all may be over before the signal arrives
        Channel channel = daemon.open("tiny").value();
        const pid_t worker = daemon.pid("tiny");
        const auto ids = submit_many(channel);
        std::vector<Answered> answers(ids.size());
        ASSERT_TRUE(take(channel, ids[0], answers[0]));

        ::kill(worker, SIGKILL);
        for (std::size_t i = 0; i < ids.size(); ++i) {
            answers[i] = rest_of(channel, ids[i], answers[i]);
            if (!answers[i].error) continue;
            ++lost;
            EXPECT_EQ(answers[i].error->code, ErrorCode::worker_lost);
            const std::size_t tokens = answers[i].streamed.size();
            const std::string count = std::to_string(tokens) + (tokens == 1 ? " token" : " tokens");
            EXPECT_THAT(answers[i].error->attempt, tokens == 0
                                                       ? testing::Matcher<std::string>{Not(HasSubstr("of the answer"))}
                                                       : HasSubstr("after " + count + " of the answer"));
        }
        ASSERT_TRUE(daemon.wait_until("tiny", [tried](const json::object& row) {
            return row.at("generation").as_int64() == tried + 1 && row.at("state").as_string() == "ready";
        }));
    }
    EXPECT_GT(lost, 0);
    Channel next = daemon.open("tiny").value();
    EXPECT_FALSE(generate(next, prompt(1), greedy(4)).error);
}

TEST(GenerationEnds, AnUnloadLetsSequencesEnd) {
    Daemon daemon{fleet({one_by_one()})};
    std::optional<Result<json::object>> receipt;
    {
        Channel channel = daemon.open("tiny").value();
        const auto ids = submit_many(channel);
        std::vector<Answered> answers(ids.size());
        ASSERT_TRUE(take(channel, ids[0], answers[0]));

        std::jthread unloading{[&] { receipt = daemon.unload("tiny"); }};
        for (std::size_t i = 0; i < ids.size(); ++i) {
            answers[i] = rest_of(channel, ids[i], answers[i]);
            EXPECT_FALSE(answers[i].error) << i << ": " << answers[i].error->text();
            EXPECT_EQ(answers[i].streamed, answers[i].all);
        }
        { const Channel closed = std::move(channel); }  // what its client maps is not back
    }

    EXPECT_EQ(receipt->value().at("ended").as_string(), "drained");
    EXPECT_TRUE(receipt->value().at("verified").as_bool());
}

TEST(GenerationEnds, StreamsGoOnWithoutASupervisor) {
    Daemon daemon{fleet({one_by_one()})};
    Channel channel = daemon.open("tiny").value();
    const pid_t worker = daemon.pid("tiny");
    const auto ids = submit_many(channel);
    std::vector<Answered> answers(ids.size());
    ASSERT_TRUE(take(channel, ids[0], answers[0]));

    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info").value().at("supervisor_pid").as_int64());
    ::kill(supervisor, SIGKILL);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        answers[i] = rest_of(channel, ids[i], answers[i]);
        ASSERT_FALSE(answers[i].error) << i << ": " << answers[i].error->text();
        EXPECT_EQ(answers[i].streamed, answers[i].all);
    }

    EXPECT_EQ(daemon.pid("tiny"), worker);
    EXPECT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        return row.at("generate").is_object() && row.at("generate").at("tokens").as_int64() == many * long_answer;
    })) << "the next supervisor hears the same counts";
}

/// What a client does not read gathers within bounds: many tokens in one part. Others are served meanwhile.
TEST(GenerationEnds, AClientThatReadsLateGetsAllAndDelaysNobody) {
    Daemon daemon{fleet({tiny("queue: 256\n")})};
    Channel silent = daemon.open("tiny").value();
    const auto ids = submit_many(silent);
    Channel other = daemon.open("tiny").value();

    for (int i = 0; i < 5; ++i) EXPECT_FALSE(generate(other, prompt(300 + i), greedy(20)).error);
    EXPECT_TRUE(daemon.wait_until("tiny", [](const json::object& row) { return row.at("in_flight").as_int64() == 0; }));
    std::size_t parts = 0;
    for (const std::uint64_t id : ids) {
        const Answered answered = rest_of(silent, id);
        ASSERT_FALSE(answered.error) << answered.error->text();
        EXPECT_EQ(answered.all.size(), static_cast<std::size_t>(long_answer));
        EXPECT_EQ(answered.streamed, answered.all);
        parts += answered.parts;
    }
    EXPECT_LT(parts, ids.size() * long_answer / 2) << "a part for each token was kept for a client that does not read";
}

/// Of `test/tiny_long`: sequences so long that a test is over before one of them. A step reads all that came before, so
/// the further a sequence has come the slower it goes.
constexpr int endless_answer = 130'000;

std::string endless(int slots) {
    return fleet({generating("tiny", model_file("test/tiny_long"),
                             "generate: {length: 131072, slots: " + std::to_string(slots) + "}\n")});
}

bool is_idle(const json::object& row) {
    return row.at("in_flight").as_int64() == 0 && row.at("generate").is_object() &&
           row.at("generate").at("active").as_int64() == 0;
}

TEST(GenerationEnds, AClientThatStopsReadingLosesItsStreamAndNobodyElseDoes) {
    Daemon daemon{endless(2)};
    Channel silent = daemon.open("tiny").value();
    Channel neighbour = daemon.open("tiny").value();
    const std::uint64_t id = submit(silent, prompt(1), greedy(endless_answer)).value();
    Answered heard;
    ASSERT_TRUE(take(silent, id, heard));

    const Answered beside = generate(neighbour, prompt(300), greedy(50));
    EXPECT_FALSE(beside.error) << beside.error->text();
    const auto is_idle_again = [](const json::object& row) {
        return is_idle(row) && row.at("generate").at("tokens").as_int64() >= 50;  // a row from before shows fewer
    };
    EXPECT_TRUE(daemon.wait_until("tiny", is_idle_again, 100s)) << "it generates for nobody";
    heard = rest_of(silent, id, heard);

    ASSERT_TRUE(heard.error);
    EXPECT_EQ(heard.error->code, ErrorCode::cancelled) << heard.error->text();
    EXPECT_THAT(heard.error->text(), HasSubstr("its client took no part of the stream for 10000 ms"));
    EXPECT_FALSE(heard.error->remedy.empty());
    EXPECT_LT(heard.streamed.size(), static_cast<std::size_t>(endless_answer));
    EXPECT_LT(static_cast<std::int64_t>(heard.parts), told(daemon).at("tokens").as_int64())
        << "a message for each token was kept for a client that does not read";
    EXPECT_FALSE(generate(silent, prompt(1), greedy(4)).error) << "its channel lives on";
    EXPECT_EQ(generate(neighbour, prompt(300), greedy(50)).all, beside.all);
    EXPECT_EQ(daemon.row("tiny").at("restarts").as_int64(), 0);
}

/// `bulkhead generate`, going on for ever; what it prints goes into a file.
class Generating {
public:
    explicit Generating(const Daemon& daemon)
        : output_{daemon.folder().path() / "generating.txt"}, process_{{program("bulkhead"), "--socket",
                                                                        daemon.socket(), "--json", "generate", "tiny",
                                                                        "--tokens", "1,2,3", "--ignore-stop",
                                                                        "--temperature", "0", "--max-new-tokens",
                                                                        std::to_string(endless_answer)},
                                                                       into(output_)} {}
    Process& process() noexcept { return process_; }
    [[nodiscard]] std::string printed() const {
        std::ifstream file{output_};
        return {std::istreambuf_iterator<char>{file}, {}};
    }

private:
    static SpawnOptions into(const std::filesystem::path& file) {
        SpawnOptions options;
        options.output = file;
        return options;
    }
    std::filesystem::path output_;
    Process process_;
};

TEST(GenerationEnds, AClientThatIsKilledInTheMidstFreesItsSlotForTheNext) {
    Daemon daemon{endless(1)};
    Generating killed{daemon};
    ASSERT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        return row.at("generate").is_object() && row.at("generate").at("tokens").as_int64() > 0;
    }));
    Channel next = daemon.open("tiny").value();
    const std::uint64_t waiting = submit(next, prompt(1), greedy(4)).value();
    ASSERT_TRUE(daemon.wait_until("tiny", [](const json::object& row) { return row.at("in_flight").as_int64() == 2; }));
    EXPECT_EQ(told(daemon).at("active").as_int64(), 1) << "there is one slot";

    killed.process().signal(SIGKILL);
    const Answered answered = rest_of(next, waiting);

    EXPECT_FALSE(answered.error) << answered.error->text();
    EXPECT_EQ(answered.all.size(), 4u);
    EXPECT_TRUE(daemon.wait_until(
        "tiny", [](const json::object& row) { return is_idle(row) && row.at("channels").as_int64() == 1; }));
    EXPECT_LT(told(daemon).at("tokens").as_int64(), endless_answer);
}

TEST(GenerationEnds, AWorkerKilledUnderTheCommandLineSaysAfterHowManyTokens) {
    Daemon daemon{endless(1)};
    Generating generating{daemon};
    ASSERT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        return row.at("generate").is_object() && row.at("generate").at("tokens").as_int64() > 0;
    }));

    ::kill(daemon.pid("tiny"), SIGKILL);

    EXPECT_EQ(generating.process().wait(30s), 1);
    const std::string printed = generating.printed();
    std::size_t tokens = 0;
    for (std::size_t at = 0; (at = printed.find("{\"token\":", at)) != std::string::npos; ++at) ++tokens;
    EXPECT_GT(tokens, 0u);
    EXPECT_THAT(printed, HasSubstr("\"code\":\"worker_lost\""));
    EXPECT_THAT(printed, HasSubstr("after " + std::to_string(tokens) + " tokens"));
    EXPECT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        return row.at("generation").as_int64() == 2 && row.at("state").as_string() == "ready";
    }));
    Channel channel = daemon.open("tiny").value();
    EXPECT_FALSE(generate(channel, prompt(1), greedy(4)).error);
}

}  // namespace
}  // namespace bulkhead::test
