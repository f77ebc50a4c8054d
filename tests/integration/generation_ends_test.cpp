// What ends a stream of tokens through the daemon, or does not: its client, its worker, an unload, a lost supervisor.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <iterator>

#include "tests/integration/fixture/fleets.h"
#include "tests/integration/fixture/generation.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr int long_answer = 240;
/// Far more sequences of that length than are over before a test has done what it does in their midst, and as many as a
/// channel takes.
constexpr int many = 64;

std::vector<std::uint64_t> submit_many(Channel& channel) {
    std::vector<std::uint64_t> ids;
    for (int i = 0; i < many; ++i) ids.push_back(submit(channel, prompt(i + 1), greedy(long_answer)).value());
    return ids;
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

/// Of `test/tiny_long`: sequences so long that a test is over before one of them. A step reads all that came before, so
/// the further a sequence has come the slower it goes.
constexpr int endless_answer = 130'000;

std::string endless(int slots) {
    return fleet({generating("tiny", model_file("test/tiny_long"),
                             "generate: {length: 131072, slots: " + std::to_string(slots) + "}\n")});
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
