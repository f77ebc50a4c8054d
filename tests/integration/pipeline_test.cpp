// One model's outputs as the next one's inputs, in shared memory all the way:
// docs/channel.md, "Lending".

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;

constexpr std::array<std::int64_t, 2> sentence{1, 16};

/// Lines of a process' maps that show a slab with this in its label.
std::vector<std::string> slabs_of(pid_t pid, const std::string& label) {
    std::ifstream maps{"/proc/" + std::to_string(pid) + "/maps"};
    std::vector<std::string> found;
    for (std::string line; std::getline(maps, line);)
        if (line.find("/memfd:bulkhead:") != std::string::npos && line.find(label) != std::string::npos)
            found.push_back(line);
    return found;
}

/// Whoever maps a slab of this label, and how often.
std::string holders_of(const std::string& label) {
    std::string holders;
    for (const auto& entry : std::filesystem::directory_iterator{"/proc"}) {
        const std::string name = entry.path().filename();
        if (name.find_first_not_of("0123456789") != std::string::npos) continue;
        if (const auto slabs = slabs_of(std::stoi(name), label); !slabs.empty())
            holders += name + " " + slabs[0] + "\n";
    }
    return holders;
}

std::string inode_of(const std::string& line) {  // address perms offset dev inode path
    std::istringstream words{line};
    std::string word;
    for (int i = 0; i < 5; ++i) words >> word;
    return word;
}

Result<Reply> forward(Channel& to, const Output& output, bool retry_safe = false) {
    const std::array<NamedInput, 1> inputs{{{"x", &output}}};
    return to.infer({.inputs = inputs, .deadline = 30s, .retry_safe = retry_safe});
}

std::string lower_half() {
    return test_model(
        "lower", "minilm_lower.pt",
        "inputs: {input_ids: {dtype: int64, shape: [1, 16]}, attention_mask: {dtype: int64, shape: [1, 16]}}\n"
        "outputs: {hidden: {dtype: float32, shape: [1, 16, 384]}, mask: {dtype: int64, shape: [1, 16]}}\n");
}

std::string upper_half() {
    return test_model(
        "upper", "minilm_upper.pt",
        "inputs: {hidden: {dtype: float32, shape: [1, 16, 384]}, attention_mask: {dtype: int64, shape: [1, 16]}}\n"
        "outputs: {embedding: {dtype: float32, shape: [1, 384]}}\n");
}

TEST(Pipeline, TwoHalvesOfARealModelEqualTheWholeAndNothingIsCopiedBetweenThem) {
    Daemon daemon{fleet({lower_half(), upper_half(), minilm()})};
    Channel lower = daemon.open("lower").value();
    Channel upper = daemon.open("upper").value();
    Channel whole = daemon.open("minilm").value();
    const auto tokens = [](Channel& channel) {
        Input ids = channel.allocate(wire::DType::int64, sentence).value();
        Input mask = channel.allocate(wire::DType::int64, sentence).value();
        constexpr std::array<std::int64_t, 16> text{101, 1037, 2158, 2003, 2652, 1996, 2858, 1012, 102};
        std::ranges::copy(text, ids.as<std::int64_t>().begin());
        for (std::size_t i = 0; i < 16; ++i) mask.as<std::int64_t>()[i] = i < 9 ? 1 : 0;
        return std::pair{std::move(ids), std::move(mask)};
    };
    const auto embedded = [&](Channel& channel) {
        const auto [ids, mask] = tokens(channel);
        const std::array<NamedInput, 2> inputs{{{"input_ids", &ids}, {"attention_mask", &mask}}};
        return channel.infer({.inputs = inputs});
    };
    const Reply expected = embedded(whole).value();
    const Reply half = embedded(lower).value();
    const std::array<NamedInput, 2> inputs{{{"hidden", half.find("hidden")}, {"attention_mask", half.find("mask")}}};

    for (int i = 0; i < 3; ++i) {
        const Result<Reply> reply = upper.infer({.inputs = inputs});
        ASSERT_TRUE(reply) << reply.error().text();
        const auto ours = reply->outputs.at(0).as<float>();
        const auto theirs = expected.outputs.at(0).as<float>();
        ASSERT_EQ(ours.size(), theirs.size());
        for (std::size_t k = 0; k < ours.size(); ++k) ASSERT_NEAR(ours[k], theirs[k], 1e-4) << k;
    }

    const auto borrowed = slabs_of(daemon.pid("upper"), ":lower/");
    ASSERT_EQ(borrowed.size(), 1U) << "lent once, for both tensors of three requests";
    EXPECT_THAT(borrowed[0], ::testing::HasSubstr(" r--s "));
    bool same = false;
    for (const std::string& own : slabs_of(daemon.pid("lower"), ":lower/"))
        same |= inode_of(own) == inode_of(borrowed[0]);
    EXPECT_TRUE(same) << "the very memory that the first half wrote";
}

/// A method of two inputs; `runtime` and its file as the fleet file says them.
std::string of_two_inputs(const std::string& name, const std::string& runtime, const std::string& first,
                          const std::string& second) {
    const std::string tensor = ": {dtype: float32, shape: [4]}";
    return "  " + name + ":\n    runtime: " + runtime + "\n    inputs: {" + first + tensor + ", " + second + tensor +
           "}\n    outputs: {y" + tensor + "}\n";
}
std::string scripted(const std::string& file) { return "torchscript\n    file: " + model_file("test/" + file).string(); }
std::string compiled(const std::string& file) { return "aoti\n    package: " + model_file("test/" + file).string(); }

TEST(Pipeline, AModelThatWritesAnInputAnswersRightlyAndLeavesTheLendersMemoryAlone) {
    Daemon daemon{fleet({test_model("a", "echo.pt"),
                         of_two_inputs("scripted", scripted("accumulate.pt"), "x", "total"),
                         of_two_inputs("compiled", compiled("accumulate.pt2"), "x", "total"),
                         of_two_inputs("reads", compiled("add.pt2"), "a", "b")})};
    Channel a = daemon.open("a").value();
    const Reply x = infer_float(a, "x", four, dims_four).value();
    const Reply total = infer_float(a, "x", four, dims_four).value();

    for (const std::string model : {"scripted", "compiled"}) {
        SCOPED_TRACE(model);
        Channel channel = daemon.open(model).value();
        const std::array<NamedInput, 2> inputs{{{"x", &x.outputs[0]}, {"total", &total.outputs[0]}}};
        for (int i = 0; i < 2; ++i) {
            const Result<Reply> reply = channel.infer({.inputs = inputs});
            ASSERT_TRUE(reply) << reply.error().text();
            EXPECT_THAT(reply->outputs[0].as<float>(), ::testing::ElementsAre(4, 8, 12, 16));
            EXPECT_THAT(total.outputs[0].as<float>(), ::testing::ElementsAreArray(four));
        }
    }

    Channel reads = daemon.open("reads").value();
    const std::array<NamedInput, 2> inputs{{{"a", &x.outputs[0]}, {"b", &total.outputs[0]}}};
    const Result<Reply> reply = reads.infer({.inputs = inputs});
    ASSERT_TRUE(reply) << reply.error().text();
    EXPECT_THAT(reply->outputs[0].as<float>(), ::testing::ElementsAre(2, 4, 6, 8));
    EXPECT_EQ(slabs_of(daemon.pid("reads"), ":a/").size(), 1U) << "lent, not copied: it writes none of its inputs";
}

class PipelineOfEchoes : public testing::Test {
protected:
    Daemon daemon{fleet({test_model("a", "echo.pt"), test_model("b", "echo.pt"), test_model("other", "echo.pt")})};
    Channel other = daemon.open("other").value();

    void expect_neighbour_served() {
        const auto reply = infer_float(other, "x", four, dims_four);
        ASSERT_TRUE(reply) << reply.error().text();
        EXPECT_THAT(reply->outputs[0].as<float>(), ::testing::ElementsAreArray(four));
    }
    void kill_worker(const std::string& model) {
        const pid_t pid = daemon.pid(model);
        ASSERT_GT(pid, 0);
        ASSERT_EQ(::kill(pid, SIGKILL), 0);
        EXPECT_TRUE(daemon.wait_until(model, [&](const json::object& row) {
            return row.at("pid").is_int64() && row.at("pid").as_int64() != pid &&
                   row.at("state").as_string() == "ready";
        }));
    }
    /// The part of a label that all slabs of this daemon have.
    std::string token() {
        const auto own = slabs_of(daemon.pid("other"), ":other/");
        const std::size_t begin = own.at(0).find("bulkhead:");
        return own.at(0).substr(begin, own.at(0).find(":other/") - begin);
    }
    /// Until nobody on this machine maps a slab of these models.
    void expect_no_slab_left() {
        std::string holders;
        for (const auto until = std::chrono::steady_clock::now() + 30s; std::chrono::steady_clock::now() < until;) {
            holders = holders_of(token() + ":a/") + holders_of(token() + ":b/");
            if (holders.empty()) return;
            expect_neighbour_served();  // time passes
        }
        ADD_FAILURE() << "still mapped by\n" << holders;
    }
};

TEST_F(PipelineOfEchoes, TheSecondWorkersDeathIsRepeatedOnTheNextWithTheSameOutput) {
    Channel a = daemon.open("a").value();
    Channel b = daemon.open("b").value();
    const Reply reply = infer_float(a, "x", four, dims_four).value();
    ASSERT_TRUE(forward(b, reply.outputs[0]));

    kill_worker("b");

    const Result<Reply> after = forward(b, reply.outputs[0], true);
    ASSERT_TRUE(after) << after.error().text();
    EXPECT_THAT(after->outputs[0].as<float>(), ::testing::ElementsAreArray(four));
    EXPECT_EQ(slabs_of(daemon.pid("b"), ":a/").size(), 1U) << "lent to the next worker, not copied";
    EXPECT_TRUE(infer_float(a, "x", four, dims_four));
    expect_neighbour_served();
}

/// Who dies, in this order: a and b are workers, c is the client.
class PipelineDeaths : public PipelineOfEchoes, public testing::WithParamInterface<const char*> {};

TEST_P(PipelineDeaths, LeaveTheNeighbourServedAndNoSlabBehind) {
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
    const pid_t client = ::fork();
    if (client == 0) {
        auto a = daemon.open("a").value();
        auto b = daemon.open("b").value();
        const auto reply = infer_float(a, "x", four, dims_four);
        const bool forwarded = reply && forward(b, reply->outputs[0]);
        [[maybe_unused]] const auto told = ::write(pipe[1], forwarded ? "1" : "0", 1);
        for (;;) ::pause();
    }
    char told = 0;
    ASSERT_EQ(::read(pipe[0], &told, 1), 1);
    ASSERT_EQ(told, '1');
    ASSERT_EQ(slabs_of(daemon.pid("b"), ":a/").size(), 1U);

    for (const char dies : std::string_view{GetParam()}) {
        if (dies == 'c') {
            ::kill(client, SIGKILL);
            ASSERT_EQ(::waitpid(client, nullptr, 0), client);
        } else {
            kill_worker(std::string{dies});
        }
        expect_neighbour_served();
    }

    expect_no_slab_left();
    for (const std::string model : {"a", "b"}) {
        Channel channel = daemon.open(model).value();
        EXPECT_TRUE(infer_float(channel, "x", four, dims_four));
    }
    ::close(pipe[0]);
    ::close(pipe[1]);
}

// Each dies before each other in one of them.
INSTANTIATE_TEST_SUITE_P(InOrder, PipelineDeaths, testing::Values("abc", "bca", "cab"),
                         [](const auto& order) { return std::string{order.param}; });

}  // namespace
}  // namespace bulkhead::test
