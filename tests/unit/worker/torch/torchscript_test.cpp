#include <cmath>
#include <limits>

#include <ATen/core/Tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ipc/slab/host_slab.h"
#include "ipc/slab/slab_allocator.h"
#include "tests/unit/worker/model_fixture.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {
namespace {

using test::Tensor;
using test::tensor_spec;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

const config::DimRange up_to_4{0, 4};

config::MethodSpec forward(std::vector<config::TensorSpec> inputs, std::vector<config::TensorSpec> outputs) {
    config::MethodSpec method;
    method.inputs = std::move(inputs);
    method.outputs = std::move(outputs);
    return method;
}

config::MethodSpec unary(std::vector<config::DimRange> shape) {
    return forward({tensor_spec("x", shape)}, {tensor_spec("y", shape)});
}

class TorchScriptTest : public testing::Test {
protected:
    void SetUp() override { SKIP_WITHOUT(test::test_models() / "counter.pt"); }

    static config::ModelSpec spec(const std::string& name, std::vector<config::MethodSpec> methods) {
        return test::model_spec(config::Runtime::torchscript, test::test_models() / (name + ".pt"), std::move(methods));
    }
    static std::unique_ptr<Model> load(const config::ModelSpec& model) {
        auto loaded = load_model(model, {});
        if (!loaded) throw ErrorException{loaded.error()};
        return std::move(loaded.value());
    }
    static Error refusal(const config::ModelSpec& model) {
        auto loaded = load_model(model, {});
        return loaded ? Error{} : loaded.error();
    }
    /// An echo model whose file holds `bytes`.
    Error refusal_of_file(const std::string& bytes) {
        auto model = spec("echo", {unary({{1, 4}})});
        model.file = folder_.path() / "broken.pt";
        test::write_file(model.file, bytes);
        return refusal(model);
    }

    test::TemporaryFolder folder_;
};

TEST_F(TorchScriptTest, AnswersWithTheDeclaredNames) {
    auto method = forward({tensor_spec("a", {{1, 4}}), tensor_spec("b", {{1, 4}})}, {tensor_spec("sum", {{1, 4}})});
    auto model = load(spec("add", {method}));

    const auto answer = test::infer(*model, "forward", {Tensor::of("b", {2}, {10, 20}), Tensor::of("a", {2}, {1, 2})});

    ASSERT_TRUE(answer) << answer.error().text();
    ASSERT_EQ(answer.value().size(), 1U);
    EXPECT_EQ(answer.value()[0].name, "sum");
    EXPECT_THAT(answer.value()[0].dims, ElementsAre(2));
    EXPECT_THAT(answer.value()[0].floats(), ElementsAre(11, 22));
    EXPECT_EQ(model->device_name(), "cpu");
}

TEST_F(TorchScriptTest, WritesAnOutArgumentWhereTheClientReadsItAndCopiesNothing) {
    const std::vector<config::TensorSpec> inputs{tensor_spec("a", {{1, 4, "n"}}), tensor_spec("b", {{1, 4, "n"}})};
    auto copying = load(spec("add", {forward(inputs, {tensor_spec("y", {{1, 4, "n"}})})}));
    auto method = forward(inputs, {tensor_spec("y", {{1, 4, "n"}})});
    method.outputs[0].out = true;
    auto model = load(spec("add_out", {method}));
    const auto copied_by = [](const Model& of) { return of.graphs().at("copied_bytes").to_number<std::uint64_t>(); };
    const std::vector<Tensor> values{Tensor::of("a", {3}, {1, 2, 3}), Tensor::of("b", {3}, {10, 20, 30})};
    const auto copied_before = copied_by(*copying);  // by the inference that a load ends with

    const auto answer = test::infer(*model, "forward", values);
    const auto copied = test::infer(*copying, "forward", values);

    ASSERT_TRUE(answer) << answer.error().text();
    ASSERT_EQ(answer.value().size(), 1U);
    EXPECT_EQ(answer.value()[0].name, "y");
    EXPECT_THAT(answer.value()[0].dims, ElementsAre(3));
    EXPECT_EQ(answer.value()[0].floats(), copied.value()[0].floats());
    EXPECT_EQ(copied_by(*model), 0U);
    EXPECT_EQ(copied_by(*copying) - copied_before, 3 * sizeof(float));
}

TEST_F(TorchScriptTest, KnowsWhichMethodsWriteTheirInputs) {
    const auto writes = [](const std::string& file, config::MethodSpec method, const std::string& name) {
        method.name = name;
        return load(spec(file, {std::move(method)}))->writes_inputs();
    };
    EXPECT_FALSE(writes("in_place", unary({{2, 2}}), "forward"));
    EXPECT_TRUE(writes("in_place", unary({{2, 2}}), "view"));
    EXPECT_TRUE(writes("in_place", unary({{2, 2}}), "out"));
    EXPECT_TRUE(writes("in_place", unary({{2, 2}}), "sometimes"));
    EXPECT_TRUE(writes("in_place", unary({{2, 2}}), "unannounced"));
    EXPECT_FALSE(writes("in_place", unary({{2, 2}}), "unwritten"));
    const auto y = tensor_spec("y", {{4, 4}});
    EXPECT_TRUE(writes("accumulate", forward({tensor_spec("x", {{4, 4}}), tensor_spec("total", {{4, 4}})}, {y}), "forward"));
    EXPECT_FALSE(writes("add", forward({tensor_spec("a", {{4, 4}}), tensor_spec("b", {{4, 4}})}, {y}), "forward"));
}

TEST_F(TorchScriptTest, CompletesParametersFromTheFile) {
    auto method = forward({tensor_spec("a", {{1, 4}}), tensor_spec("b", {{1, 4}})}, {tensor_spec("sum", {{1, 4}})});
    auto model = load(spec("add", {method}));
    const config::ParameterSpec scale{"scale", config::ParameterType::number, 1.0};
    EXPECT_THAT(model->methods()[0].parameters, ElementsAre(scale));

    const auto answer =
        test::infer(*model, "forward", {Tensor::of("a", {1}, {1}), Tensor::of("b", {1}, {10})}, {{"scale", 2}});

    EXPECT_THAT(answer.value()[0].floats(), ElementsAre(21));
}

TEST_F(TorchScriptTest, PassesNanEmptyAndScalarTensorsThroughUnchanged) {
    auto model = load(spec("echo", {unary({up_to_4})}));
    auto scalars = load(spec("echo", {unary({})}));
    constexpr auto infinity = std::numeric_limits<float>::infinity();

    const auto odd = test::infer(*model, "forward", {Tensor::of("x", {3}, {std::nanf("1"), infinity, -0.0F})});
    const auto empty = test::infer(*model, "forward", {Tensor::of("x", {0}, {})});
    const auto scalar = test::infer(*scalars, "forward", {Tensor::of("x", {}, {7})});

    EXPECT_EQ(odd.value()[0].bytes, Tensor::of("x", {3}, {std::nanf("1"), infinity, -0.0F}).bytes);
    EXPECT_THAT(empty.value()[0].dims, ElementsAre(0));
    EXPECT_TRUE(scalar.value()[0].dims.empty());
    EXPECT_THAT(scalar.value()[0].floats(), ElementsAre(7));
}

/// A runtime that keeps where its inputs lay.
class WatchingRuntime final : public Runtime {
public:
    std::vector<at::Tensor> call(const config::MethodSpec&, const std::vector<at::Tensor>& inputs,
                                 const std::vector<config::ParameterValue>&) override {
        seen = inputs;
        return inputs;
    }
    void reset() override {}
    std::vector<at::Tensor> seen;
};

/// As on a channel: the worker makes the slab, the client maps it, allocates and writes.
TEST(CpuDevice, HandsTheSlabsOwnBytesToTheModel) {
    const auto slab = HostSlab::create(1 << 16, wire::SlabDirection::input, "bulkhead:test").value();
    const auto client =
        HostSlab::adopt(UniqueFd{::dup(slab.fd())}, slab.size_bytes(), wire::SlabDirection::input).value();
    SlabAllocator allocator{slab.size_bytes()};
    (void)allocator.allocate(100).value();  // so that the tensor does not lie at the
                                            // slab's beginning
    const auto lease = allocator.allocate(4 * sizeof(float)).value();
    const std::array<float, 4> values{1, 2, 3, 4};
    std::memcpy(client.bytes().data() + lease.offset_bytes, values.data(), sizeof values);
    const std::array<std::int64_t, 2> dims{2, 2};
    const std::vector views{
        TensorView{"x", wire::DType::float32, dims, slab.bytes().subspan(lease.offset_bytes, lease.size_bytes)}};
    WatchingRuntime runtime;
    test::KeepingSink sink;

    const auto ran = make_cpu_device()->run(runtime, unary({{2, 2}, {2, 2}}), views, {}, sink);

    ASSERT_TRUE(ran) << ran.error().text();
    EXPECT_EQ(runtime.seen[0].data_ptr(), slab.bytes().data() + lease.offset_bytes);
    EXPECT_THAT(sink.outputs[0].floats(), ElementsAre(1, 2, 3, 4));
}

TEST_F(TorchScriptTest, WritesTuplesListsAndStridedResults) {
    auto pair = forward({tensor_spec("x", {{2, 2}, {3, 3}})}, {});
    auto halves = forward({tensor_spec("x", {{2, 2}, {3, 3}})},
                          {tensor_spec("top", {{1, 1}, {3, 3}}), tensor_spec("bottom", {{1, 1}, {3, 3}})});
    halves.name = "halves";
    auto model = load(spec("multi_output", {pair, halves}));
    const auto x = Tensor::of("x", {2, 3}, {1, 2, 3, 4, 5, 6});

    const auto two = test::infer(*model, "forward", {x}).value();
    const auto listed = test::infer(*model, "halves", {x}).value();

    EXPECT_EQ(two[0].name, "output0") << "undeclared outputs are numbered";
    EXPECT_THAT(two[0].dims, ElementsAre(3, 2));
    EXPECT_THAT(two[0].floats(), ElementsAre(1, 4, 2, 5, 3, 6));
    EXPECT_THAT(two[1].floats(), ElementsAre(21));
    EXPECT_EQ(listed[1].name, "bottom");
    EXPECT_THAT(listed[1].floats(), ElementsAre(4, 5, 6));
}

TEST_F(TorchScriptTest, ForgetsItsStateOnResetAndAfterWarmingUp) {
    auto declared = spec("counter", {unary({{1, 1}})});
    declared.state = config::StateScope::channel;
    declared.reset_method = "reset";
    auto model = load(declared);
    const auto add = [&](float value) {
        return test::infer(*model, "forward", {Tensor::of("x", {1}, {value})}).value()[0].floats()[0];
    };
    EXPECT_EQ(add(1), 1);
    EXPECT_EQ(add(2), 3);
    ASSERT_TRUE(model->reset());
    EXPECT_EQ(add(5), 5);
}

TEST_F(TorchScriptTest, TellsTheModelsOwnWordsWhenItRaises) {
    auto model = load(spec("raises", {unary({{1, 4}})}));

    const auto error = test::infer(*model, "forward", {Tensor::of("x", {1}, {-1})}).error();

    EXPECT_EQ(error.code, ErrorCode::inference_failed);
    EXPECT_EQ(error.attempt, "running forward: builtins.ValueError: the model refuses negative numbers");
    EXPECT_TRUE(test::infer(*model, "forward", {Tensor::of("x", {1}, {1})})) << "the next request finds it well";
}

TEST_F(TorchScriptTest, TellsLibTorchsWordsWithoutItsStack) {
    auto method = forward({tensor_spec("a", {{1, 4}}), tensor_spec("b", {{1, 4}})}, {tensor_spec("sum", {{1, 4}})});
    auto model = load(spec("add", {method}));

    const auto error =
        test::infer(*model, "forward", {Tensor::of("a", {2}, {1, 2}), Tensor::of("b", {3}, {1, 2, 3})}).error();

    EXPECT_EQ(error.code, ErrorCode::inference_failed);
    EXPECT_THAT(error.attempt, HasSubstr("size of tensor a (2) must match the size of tensor b (3)"));
    EXPECT_THAT(error.attempt, Not(HasSubstr("frame #")));
    EXPECT_THAT(error.attempt, Not(HasSubstr("Traceback")));
}

TEST_F(TorchScriptTest, RefusesDeclarationsThatTheFileContradicts) {
    const auto square = unary({{2, 2}, {2, 2}}), line = unary({{1, 4}});
    auto misnamed = square, typed = square, tensor = square, missing = square;
    misnamed.inputs[0].name = "audio";
    typed.parameters = {{"rounds", config::ParameterType::string, std::string{"3"}}};
    tensor.inputs.push_back(tensor_spec("rounds", {}));
    missing.inputs.clear();
    auto unknown = line, more = line, dtype = line, shape = line;
    unknown.name = "encode";
    more.outputs.push_back(tensor_spec("z", {}));
    dtype.outputs[0].dtype = wire::DType::int64;
    shape.outputs[0].shape = {{1, 1}, {1, 4}};
    auto out = forward({tensor_spec("a", {{2, 2}}), tensor_spec("b", {{2, 2}})}, {tensor_spec("sum", {{2, 2}})});
    out.outputs[0].out = true;
    auto reset = spec("counter", {unary({{1, 1}})}), graphs = spec("echo", {line});
    reset.reset_method = "reset_states";
    graphs.graphs = config::Graphs::required;
    const struct {
        config::ModelSpec declared;
        std::string attempt;
        std::string remedy{};
    } all[] = {
        {spec("slow", {misnamed}), "input \"audio\", the file's takes (Tensor x, int rounds=1"},
        {spec("slow", {typed}), "\"rounds\" (int in the file) is declared as a string"},
        {spec("slow", {tensor}), "\"rounds\" (int in the file) is declared as an input"},
        {spec("slow", {missing}), "\"x\" (Tensor in the file) is not declared"},
        {spec("multi_output", {unknown}), "encode", "halves"},
        {spec("echo", {more}), "returned 1 tensors, 2 outputs are declared"},
        {spec("echo", {dtype}), "returned float32, declared is int64"},
        {spec("echo", {shape}), "returned shape [1], declared is [1, 1..4]"},
        {spec("add", {out}), "`out` output \"sum\""},
        {reset, "no method \"reset_states\""},
        {spec("echo", {}), "", "shape"},
        {graphs, "", "graphs need a GPU"},
    };
    for (const auto& each : all) {
        const auto error = refusal(each.declared);
        SCOPED_TRACE(error.text());
        EXPECT_EQ(error.code, ErrorCode::config_invalid);
        EXPECT_THAT(error.attempt, HasSubstr(each.attempt));
        EXPECT_THAT(error.remedy, HasSubstr(each.remedy));
        EXPECT_FALSE(error.remedy.empty());
    }
}

TEST_F(TorchScriptTest, SaysInWhichShapesAWarmUpFailed) {
    const auto error = refusal(spec("slow", {unary({{2, 2}, {3, 3}})}));
    EXPECT_EQ(error.code, ErrorCode::load_failed);
    EXPECT_THAT(error.attempt, HasSubstr("warming up forward with zeros (x [2, 3])"));
    EXPECT_THAT(error.remedy, HasSubstr("warmup"));
}

TEST_F(TorchScriptTest, SaysWhatIsWrongWithABrokenFile) {
    const auto whole = test::contents(test::test_models() / "echo.pt");
    const std::vector<std::pair<std::string, std::string>> files{
        {"", "it is empty (0 bytes)"},
        {"PK", "its 2 bytes start with 50 4b"},
        {std::string(100, 'x'), "its 100 bytes start with 78 78 78 78"},
        {whole.substr(0, whole.size() / 2), "central directory"},
        {whole.substr(0, whole.size() - 1), "central directory"},
    };
    for (const auto& [bytes, words] : files) {
        const auto error = refusal_of_file(bytes);
        EXPECT_EQ(error.code, ErrorCode::load_failed) << error.text();
        EXPECT_THAT(error.attempt, HasSubstr(words));
        EXPECT_THAT(error.attempt, HasSubstr("broken.pt"));
        EXPECT_THAT(error.attempt, Not(HasSubstr("frame #")));
        EXPECT_FALSE(error.remedy.empty());
    }
}

TEST_F(TorchScriptTest, SaysWhichFileIsMissing) {
    auto declared = spec("echo", {unary({{1, 4}})});
    declared.file = folder_.path() / "nowhere.pt";
    const auto error = refusal(declared);
    EXPECT_EQ(error.code, ErrorCode::load_failed);
    EXPECT_THAT(error.attempt, HasSubstr("nowhere.pt: No such file or directory"));

    declared.file = folder_.path();
    EXPECT_THAT(refusal(declared).attempt, HasSubstr("not a regular file"));
}

TEST_F(TorchScriptTest, ReportsReadingThenWarming) {
    test::ToldProgress told;
    LoadContext context;
    context.progress = told.listener();
    ASSERT_TRUE(load_model(spec("echo", {unary({{1, 4}})}), context));
    EXPECT_THAT(told.phases(), ElementsAre("reading bytes", "warming steps"));
    told.expect_whole_phases();
}

TEST_F(TorchScriptTest, CountsRunsWithTheReasonWhyTheyWereEager) {
    auto model = load(spec("echo", {unary({{1, 4}})}));
    const auto eager = [&] { return model->graphs().at("eager").as_object().begin()->value().to_number<int>(); };
    const auto before = eager();
    ASSERT_TRUE(test::infer(*model, "forward", {Tensor::of("x", {1}, {1})}));
    EXPECT_EQ(model->graphs().at("mode"), "off");
    EXPECT_EQ(eager(), before + 1);
}

}  // namespace
}  // namespace bulkhead::worker
