// Models that generate, through the daemon: streams, and what happens to them when something ends.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <numeric>
#include <optional>
#include <thread>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t vocabulary = 512;
constexpr std::int64_t length = 256;
constexpr int long_answer = 240;
/// Far more sequences of that length than are over before a test has done what it does in their midst, and as many as a
/// channel takes.
constexpr int many = 64;

std::filesystem::path package() { return model_file("test/tiny_generate"); }
std::string tiny(const std::string& extra = {}) { return generating("tiny", package(), extra); }
/// One sequence at a time; the others wait.
std::string one_by_one() { return tiny("generate: {slots: 1}\nqueue: 256\ndeadlines: {drain: 60s}\n"); }

std::vector<std::int64_t> prompt(std::int64_t first, std::size_t size = 8) {
    std::vector<std::int64_t> ids(size);
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

Input tokens_in(Channel& channel, const std::vector<std::int64_t>& ids) {
    const std::array<std::int64_t, 1> dims{static_cast<std::int64_t>(ids.size())};
    Input input = channel.allocate(wire::DType::int64, dims).value();
    std::ranges::copy(ids, input.as<std::int64_t>().begin());
    return input;
}

/// Greedy, so many tokens, whatever the model thinks of stopping.
json::object greedy(int count) { return {{"temperature", 0}, {"max_new_tokens", count}, {"ignore_stop", true}}; }

Result<std::uint64_t> submit(Channel& channel, const std::vector<std::int64_t>& ids, json::object parameters,
                             bool in_parts = true) {
    const Input tokens = tokens_in(channel, ids);
    const std::array<NamedInput, 1> inputs{{{"tokens", &tokens}}};
    return channel.submit(
        {.method = "generate", .inputs = inputs, .parameters = std::move(parameters), .in_parts = in_parts});
}

/// What came of one request.
struct Answered {
    std::vector<std::int64_t> streamed;
    std::size_t parts = 0;
    std::vector<std::int64_t> all;  ///< as the end says
    json::object values;
    std::optional<Error> error;
};

/// The next part; false when there is none any more.
bool take(Channel& channel, std::uint64_t id, Answered& answered) {
    const Result<Reply> part = channel.next(id);
    if (!part) {
        answered.error = part.error();
        return false;
    }
    if (part->more) {
        ++answered.parts;
        for (const json::value& token : part->values.at("tokens").as_array()) answered.streamed.push_back(token.as_int64());
        return true;
    }
    const auto all = part->outputs.at(0).as<std::int64_t>();
    answered.all.assign(all.begin(), all.end());
    answered.values = part->values;
    return false;
}

Answered rest_of(Channel& channel, std::uint64_t id, Answered answered = {}) {
    while (take(channel, id, answered)) {
    }
    return answered;
}

Answered generate(Channel& channel, const std::vector<std::int64_t>& ids, json::object parameters) {
    const Result<std::uint64_t> id = submit(channel, ids, std::move(parameters));
    if (id) return rest_of(channel, *id);
    Answered refused;
    refused.error = id.error();
    return refused;
}

std::vector<std::uint64_t> submit_many(Channel& channel) {
    std::vector<std::uint64_t> ids;
    for (int i = 0; i < many; ++i) ids.push_back(submit(channel, prompt(i + 1), greedy(long_answer)).value());
    return ids;
}

json::object told(const Daemon& daemon) { return daemon.row("tiny").at("generate").as_object(); }

TEST(Generation, StreamsTokensAndEndsWithAllOfThem) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    const json::object& described = channel.methods().at("generate").as_object();
    EXPECT_EQ(described.at("vocabulary").as_int64(), vocabulary);
    EXPECT_EQ(described.at("length").as_int64(), length);
    EXPECT_EQ(described.at("package").as_string(), package().string());

    const Answered answered = generate(channel, prompt(3), greedy(40));

    ASSERT_FALSE(answered.error) << answered.error->text();
    EXPECT_EQ(answered.streamed.size(), 40u);
    EXPECT_EQ(answered.streamed, answered.all);
    EXPECT_EQ(answered.values.at("finish").as_string(), "length");
    EXPECT_EQ(answered.values.at("new_tokens").as_int64(), 40);
    EXPECT_EQ(answered.values.at("prompt_tokens").as_int64(), 8);
    EXPECT_GT(answered.values.at("tokens_per_second").to_number<double>(), 0);
    EXPECT_GT(answered.values.at("first_token_ms").to_number<double>(), 0);
}

TEST(Generation, GivesTheSameToWhoeverAsks) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    const Answered streamed = generate(channel, prompt(3), greedy(40));
    ASSERT_FALSE(streamed.error);
    const Answered other = generate(channel, prompt(100), greedy(40));
    EXPECT_NE(other.all, streamed.all);

    const Answered again = generate(channel, prompt(3), greedy(40));
    const Answered at_once = rest_of(channel, submit(channel, prompt(3), greedy(40), false).value());
    const Finished cli = daemon.cli({"--json", "generate", "tiny", "--tokens", "3,4,5,6,7,8,9,10", "--temperature", "0",
                                     "--max-new-tokens", "40", "--ignore-stop"});

    EXPECT_EQ(again.all, streamed.all) << "a slot shows no trace of what it held before";
    EXPECT_EQ(at_once.all, streamed.all);
    EXPECT_TRUE(at_once.streamed.empty());
    ASSERT_EQ(cli.exit_code, 0) << cli.err;
    const std::size_t last_line = cli.out.rfind('\n', cli.out.size() - 2) + 1;
    const json::value document = json::parse(cli.out.substr(last_line));
    EXPECT_EQ(json::value_to<std::vector<std::int64_t>>(document.at("tokens")), streamed.all);
    EXPECT_EQ(std::count(cli.out.begin(), cli.out.end(), '\n'), 41);
    EXPECT_TRUE(cli.out.starts_with("{\"token\":" + std::to_string(streamed.all.front()) + "}\n")) << cli.out;
}

TEST(Generation, ASeedMakesASampledSequenceComeAgain) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    const auto sampled = [&](int seed) {
        return generate(channel, prompt(3),
                        {{"do_sample", true}, {"temperature", 1}, {"seed", seed}, {"max_new_tokens", 64}, {"ignore_stop", true}})
            .all;
    };
    const auto first = sampled(7);
    EXPECT_EQ(first.size(), 64u);
    EXPECT_NE(sampled(8), first);
    EXPECT_EQ(sampled(7), first);
}

TEST(Generation, AKnownPrefixIsNotComputedAgain) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    std::vector<std::int64_t> longer = prompt(20, 64);
    const Answered fresh = generate(channel, longer, greedy(16));
    Daemon other{fleet({tiny()})};
    Channel elsewhere = other.open("tiny").value();
    ASSERT_FALSE(generate(elsewhere, prompt(20, 40), greedy(1)).error);

    const Answered reused = generate(elsewhere, longer, greedy(16));

    EXPECT_EQ(fresh.values.at("reused_tokens").as_int64(), 0);
    EXPECT_GE(reused.values.at("reused_tokens").as_int64(), 39);
    EXPECT_EQ(reused.all, fresh.all);
}

TEST(Generation, SeveralClientsGenerateSideBySide) {
    Daemon daemon{fleet({tiny("generate: {slots: 4}\n")})};
    std::vector<Answered> answers(6);
    {
        std::vector<std::jthread> clients;
        for (std::size_t i = 0; i < answers.size(); ++i)
            clients.emplace_back([&, i] {
                Channel channel = daemon.open("tiny").value();
                answers[i] = generate(channel, prompt(static_cast<std::int64_t>(50 * i)), greedy(100));
            });
    }
    for (const Answered& answered : answers) {
        ASSERT_FALSE(answered.error) << answered.error->text();
        EXPECT_EQ(answered.all.size(), 100u);
        EXPECT_EQ(answered.streamed, answered.all);
    }
    EXPECT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        const json::object& generate = row.at("generate").as_object();
        return generate.at("tokens").as_int64() == 600 && generate.at("active").as_int64() == 0;
    }));
}

TEST(Generation, PsAndWhyShowIt) {
    Daemon daemon{fleet({tiny(), test_model("echo", "echo.pt")})};
    Channel channel = daemon.open("tiny").value();
    ASSERT_FALSE(generate(channel, prompt(3), greedy(40)).error);
    ASSERT_TRUE(daemon.wait_until("tiny", [](const json::object& row) {
        return row.at("generate").is_object() && row.at("generate").at("tokens").as_int64() == 40;
    }));

    EXPECT_EQ(told(daemon).at("slots").as_int64(), 4);
    EXPECT_TRUE(daemon.row("echo").at("generate").is_null());
    const std::string table = daemon.cli({"ps"}).out;
    EXPECT_THAT(table, HasSubstr("SLOTS  TOKENS/S"));
    EXPECT_THAT(table, HasSubstr("0/4"));
    const std::string why = daemon.cli({"why", "tiny"}).out;
    EXPECT_THAT(why, HasSubstr("generating: 0/4 slots; 40 tokens, "));
    EXPECT_THAT(why, HasSubstr("steps: p50 "));
}

TEST(Generation, RefusesWhatMakesNoSenseAndServesOn) {
    Daemon daemon{fleet({tiny()})};
    Channel channel = daemon.open("tiny").value();
    const auto refused = [&](const std::vector<std::int64_t>& ids, json::object parameters, const char* words) {
        const Answered answered = generate(channel, ids, std::move(parameters));
        ASSERT_TRUE(answered.error) << words;
        EXPECT_EQ(answered.error->code, ErrorCode::input_invalid) << answered.error->text();
        EXPECT_THAT(answered.error->text(), HasSubstr(words));
        EXPECT_FALSE(answered.error->remedy.empty()) << answered.error->text();
    };

    refused({}, {}, "empty");
    refused(prompt(1, length + 1), {}, "257");
    refused({1, -1}, {}, "-1");
    refused({1, vocabulary}, {}, "512");
    refused({1}, {{"temperature", -1}}, "temperature");
    refused({1}, {{"temperature", "hot"}}, "temperature");
    refused({1}, {{"top_p", 0}}, "top_p");
    refused({1}, {{"top_p", 1.5}}, "top_p");
    refused({1}, {{"min_p", 2}}, "min_p");
    refused({1}, {{"top_k", -1}}, "top_k");
    refused({1}, {{"repetition_penalty", 0}}, "repetition_penalty");
    refused({1}, {{"max_new_tokens", 0}}, "max_new_tokens");
    refused({1}, {{"seed", 1.5}}, "seed");
    refused({1}, {{"stop", json::array{vocabulary}}}, "stop");
    refused({1}, {{"banned", json::array{-1}}}, "banned");
    refused({1}, {{"temperature", 0}, {"do_sample", true}}, "do_sample");
    refused({1}, {{"temprature", 1}}, "temprature");

    const std::array<std::int64_t, 1> dims{1};
    const Input narrow = channel.allocate(wire::DType::int32, dims).value();
    const std::array<NamedInput, 1> of_int32{{{"tokens", &narrow}}};
    EXPECT_EQ(channel.infer({.method = "generate", .inputs = of_int32}).error().code, ErrorCode::dtype_unsupported);
    const Input wide = channel.allocate(wire::DType::int64, std::array<std::int64_t, 2>{1, 1}).value();
    const std::array<NamedInput, 1> of_two_dims{{{"tokens", &wide}}};
    EXPECT_EQ(channel.infer({.method = "generate", .inputs = of_two_dims}).error().code, ErrorCode::shape_mismatch);
    EXPECT_EQ(channel.infer({.method = "generate"}).error().code, ErrorCode::input_invalid);
    EXPECT_EQ(channel.infer({.method = "forward"}).error().code, ErrorCode::method_unknown);

    EXPECT_FALSE(generate(channel, {1}, greedy(4)).error);
}

TEST(Generation, CancellingEndsASequenceInItsMidst) {
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

TEST(Generation, AClientThatGoesFreesItsSlotForTheNext) {
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

TEST(Generation, AWorkerKilledInTheMidstSaysHowMuchHadCome) {
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
            const std::string count = std::to_string(answers[i].parts) + (answers[i].parts == 1 ? " part" : " parts");
            EXPECT_THAT(answers[i].error->attempt,
                        answers[i].parts == 0 ? testing::Matcher<std::string>{Not(HasSubstr("of the answer"))}
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

TEST(Generation, AnUnloadLetsSequencesEnd) {
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

TEST(Generation, StreamsGoOnWithoutASupervisor) {
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
TEST(Generation, AClientThatReadsLateGetsAllAndDelaysNobody) {
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

/// A copy of the package with something wrong in it.
class BrokenPackage {
public:
    BrokenPackage() { std::filesystem::copy(package(), path(), std::filesystem::copy_options::recursive); }
    [[nodiscard]] std::filesystem::path path() const { return folder_.path() / "package"; }
    void set(std::string_view key, json::value value) const {
        json::value manifest = [&] {
            std::ifstream file{path() / "manifest.json"};
            return json::parse(file);
        }();
        manifest.as_object()[key] = std::move(value);
        std::ofstream{path() / "manifest.json"} << json::serialize(manifest);
    }
    /// Loading it fails. Returns  how
    [[nodiscard]] Error refused() const {
        Daemon daemon{fleet({generating("broken", path())})};
        const auto loaded = daemon.load("broken");
        EXPECT_FALSE(loaded);
        return loaded ? Error{} : loaded.error();
    }

private:
    TemporaryFolder folder_;
};

TEST(BadPackage, SaysWhatIsWrongAndWhatToDo) {
    const auto says = [](const Error& error, ErrorCode code, const char* words) {
        EXPECT_EQ(error.code, code) << error.text();
        EXPECT_THAT(error.text(), HasSubstr(words));
        EXPECT_FALSE(error.remedy.empty()) << error.text();
    };
    {
        const BrokenPackage other_torch;
        other_torch.set("torch", "1.13.1");
        says(other_torch.refused(), ErrorCode::package_incompatible, "1.13.1");
    }
    {
        const BrokenPackage of_a_gpu;
        of_a_gpu.set("device", "cuda");
        says(of_a_gpu.refused(), ErrorCode::package_incompatible, "cuda");
    }
    {
        const BrokenPackage truncated;
        std::filesystem::resize_file(truncated.path() / "weights.safetensors", 100'000);
        says(truncated.refused(), ErrorCode::package_incompatible, "weights.safetensors");
    }
    {
        const BrokenPackage without_method;
        std::filesystem::remove(without_method.path() / "decode.pt2");
        says(without_method.refused(), ErrorCode::load_failed, "decode.pt2");
    }
    {
        const BrokenPackage of_nothing_known;
        of_nothing_known.set("format", "bulkhead-generate/9");
        says(of_nothing_known.refused(), ErrorCode::package_incompatible, "bulkhead-generate/9");
    }
}

}  // namespace
}  // namespace bulkhead::test
