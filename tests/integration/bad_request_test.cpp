// Requests that are wrong, each with an error that names the place; the worker lives on.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::array<std::int64_t, 2> dims_one_four{1, 4};

class BadRequest : public ::testing::Test {
protected:
    Daemon daemon{fleet(
        {test_model("echo", "echo.pt"),
         test_model("narrow", "echo.pt",
                    "inputs: {x: {dtype: float32, shape: [1..8]}}\noutputs: {y: {dtype: float32, shape: [1..8]}}")})};
    Channel channel{daemon.open("narrow").value()};

    void TearDown() override { EXPECT_TRUE(infer_float(channel, "x", four, dims_four)) << "the channel lives on"; }

    Error error_of(std::span<const NamedInput> inputs, std::string_view method = "forward",
                   json::object parameters = {}) {
        Request request;
        request.method = method;
        request.inputs = inputs;
        request.parameters = std::move(parameters);
        const auto reply = channel.infer(request);
        return reply ? Error{} : reply.error();
    }
};

TEST_F(BadRequest, WrongRank) {
    const auto tensor = channel.allocate(wire::DType::float32, dims_one_four).value();
    const auto error = error_of(std::array{NamedInput{"x", &tensor}});

    EXPECT_EQ(error.code, ErrorCode::shape_mismatch);
    EXPECT_THAT(error.text(), AllOf(HasSubstr("\"x\""), HasSubstr("[1, 4]"), HasSubstr("[1..8]")));
}

TEST_F(BadRequest, ShapeOutsideTheDeclaredRange) {
    const auto tensor = channel.allocate(wire::DType::float32, std::array<std::int64_t, 1>{9}).value();
    const auto error = error_of(std::array{NamedInput{"x", &tensor}});

    EXPECT_EQ(error.code, ErrorCode::shape_mismatch);
    EXPECT_THAT(error.text(), AllOf(HasSubstr("[9]"), HasSubstr("[1..8]")));
}

TEST_F(BadRequest, WrongType) {
    const auto tensor = channel.allocate(wire::DType::int64, dims_four).value();
    const auto error = error_of(std::array{NamedInput{"x", &tensor}});

    EXPECT_EQ(error.code, ErrorCode::dtype_unsupported);
    EXPECT_THAT(error.text(), AllOf(HasSubstr("int64"), HasSubstr("float32")));
}

TEST_F(BadRequest, MissingSurplusAndMisnamedInputs) {
    const auto tensor = channel.allocate(wire::DType::float32, dims_four).value();

    const auto missing = error_of({});
    const auto misnamed = error_of(std::array{NamedInput{"y", &tensor}});
    const auto surplus = error_of(std::array{NamedInput{"x", &tensor}, NamedInput{"extra", &tensor}});

    EXPECT_EQ(missing.code, ErrorCode::input_invalid);
    EXPECT_THAT(missing.text(), HasSubstr("\"x\""));
    EXPECT_EQ(misnamed.code, ErrorCode::input_invalid);
    EXPECT_THAT(misnamed.text(), HasSubstr("\"y\""));
    EXPECT_EQ(surplus.code, ErrorCode::input_invalid);
    EXPECT_THAT(surplus.text(), HasSubstr("\"extra\""));
}

TEST_F(BadRequest, UnknownMethodAndParameter) {
    const auto tensor = channel.allocate(wire::DType::float32, dims_four).value();

    const auto method = error_of(std::array{NamedInput{"x", &tensor}}, "backward");
    const auto parameter = error_of(std::array{NamedInput{"x", &tensor}}, "forward", {{"temperature", 1}});

    EXPECT_EQ(method.code, ErrorCode::method_unknown);
    EXPECT_THAT(method.text(), AllOf(HasSubstr("backward"), HasSubstr("forward")));
    EXPECT_EQ(parameter.code, ErrorCode::input_invalid);
    EXPECT_THAT(parameter.text(), HasSubstr("temperature"));
}

TEST_F(BadRequest, UnknownModel) {
    const auto opened = daemon.open("nobody");

    ASSERT_FALSE(opened);
    EXPECT_EQ(opened.error().code, ErrorCode::model_unknown);
}

TEST_F(BadRequest, MoreBytesThanTheChannelMayHold) {
    const auto tensor = channel.allocate(wire::DType::float32, std::array<std::int64_t, 1>{std::int64_t{1} << 32});

    ASSERT_FALSE(tensor);
    EXPECT_EQ(tensor.error().code, ErrorCode::resources_exhausted);
    EXPECT_FALSE(tensor.error().remedy.empty());
}

TEST_F(BadRequest, NanAndInfinityPassThroughUnchanged) {
    const std::array<float, 4> odd{std::nanf("0x5ca1e"), -0.0f, std::numeric_limits<float>::infinity(),
                                   std::numeric_limits<float>::denorm_min()};
    const auto reply = infer_float(channel, "x", odd, dims_four).value();

    EXPECT_EQ(std::memcmp(reply.outputs[0].bytes().data(), odd.data(), sizeof odd), 0);
}

TEST_F(BadRequest, EmptyTensorsPassThroughUnchanged) {
    auto wide = daemon.open("echo").value();
    const auto reply = infer_float(wide, "x", {}, std::array<std::int64_t, 1>{0});

    ASSERT_TRUE(reply) << reply.error().text();
    EXPECT_THAT(reply->outputs[0].dims(), ::testing::ElementsAre(0));
    EXPECT_TRUE(reply->outputs[0].bytes().empty());
}

TEST(SharedDimension, OfDifferentSizesIsRefusedBeforeTheModelReadsPastTheShorterTensor) {
    Daemon daemon{fleet({minilm()})};
    auto channel = daemon.open("minilm").value();
    const auto four_ids = channel.allocate(wire::DType::int64, dims_one_four).value();
    const auto one_mask = channel.allocate(wire::DType::int64, std::array<std::int64_t, 2>{1, 1}).value();
    const std::array inputs{NamedInput{"input_ids", &four_ids}, NamedInput{"attention_mask", &one_mask}};
    Request request;
    request.inputs = inputs;

    const auto reply = channel.infer(request);

    ASSERT_FALSE(reply);
    EXPECT_EQ(reply.error().code, ErrorCode::shape_mismatch);
    EXPECT_THAT(reply.error().text(),
                AllOf(HasSubstr("\"input_ids\" and \"attention_mask\""), HasSubstr("dimension n: 4 and 1 came")));
}

TEST(Stateful, ServesOneClientAtATimeAndIsResetBetweenThem) {
    Daemon daemon{fleet({silero_vad()})};
    const std::array<std::int64_t, 2> dims{1, 512};
    std::vector<float> tone(512);
    for (std::size_t i = 0; i < tone.size(); ++i) tone[i] = 0.3f * std::sin(0.05f * static_cast<float>(i));
    const auto two_chunks = [&](Channel& channel) {
        (void)infer_float(channel, "x", tone, dims, {{"sr", 16000}}).value();
        return infer_float(channel, "x", tone, dims, {{"sr", 16000}}).value().outputs[0].as<float>()[0];
    };
    float first = 0;
    {
        auto channel = daemon.open("silero-vad").value();
        first = two_chunks(channel);

        const auto second = daemon.open("silero-vad");
        ASSERT_FALSE(second);
        EXPECT_EQ(second.error().code, ErrorCode::busy) << second.error().text();
    }
    Result<Channel> next = daemon.open("silero-vad");
    while (!next && next.error().code == ErrorCode::busy) next = daemon.open("silero-vad");
    ASSERT_TRUE(next) << next.error().text();

    EXPECT_EQ(two_chunks(*next), first);
}

}  // namespace
}  // namespace bulkhead::test
