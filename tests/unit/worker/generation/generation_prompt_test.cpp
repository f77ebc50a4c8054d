/// Prompts that are more than tokens below the vocabulary: pictures beside tokens, text
/// among audio codes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/generation/generate_parameters.h"

namespace bulkhead::worker::generation {
namespace {

using ::testing::HasSubstr;

config::DimRange fixed(std::int64_t size) { return {size, size, ""}; }
const config::DimRange along{1, 32, "T"};

/// As the manifest of a model that sees gives it: two numbers for each position, and where
/// positions stand.
Shape seeing() {
    Shape shape;
    shape.length = 32;
    shape.vocabulary = 100;
    shape.inputs = {{"tokens", wire::DType::int64, {along}},
                    {"vision", wire::DType::float32, {along, fixed(2)}},
                    {"rope", wire::DType::int64, {fixed(3), along}}};
    return shape;
}

/// A tensor and the memory it lies in.
template <class T>
struct Given {
    std::string name;
    wire::DType dtype;
    std::vector<std::int64_t> dims;
    std::vector<T> values;
    TensorView view() { return {name, dtype, dims, std::as_writable_bytes(std::span{values})}; }
};

struct Prompting {
    explicit Prompting(Shape of) : shape{std::move(of)} {}
    Result<> read(std::vector<TensorView> inputs) {
        ordered.clear();
        ask = {};
        return read_prompt(method, inputs, ordered, ask);
    }
    Shape shape;
    Method method{shape};
    std::vector<TensorView> ordered;
    GenerateParameters ask;
};

struct GenerationPrompt : ::testing::Test {
    Prompting model{seeing()};
    Given<std::int64_t> tokens{"tokens", wire::DType::int64, {3}, {1, 2, 3}};
    Given<float> vision{"vision", wire::DType::float32, {3, 2}, {0, 0, 1, 1, 0, 0}};
    Given<std::int64_t> rope{"rope", wire::DType::int64, {3, 3}, {0, 1, 2, 0, 1, 2, 0, 1, 2}};
};

TEST_F(GenerationPrompt, OfTokensAloneLeavesPicturesAndPositionsOut) {
    ASSERT_TRUE(model.read({tokens.view()}));

    EXPECT_TRUE(model.ask.tokens_tell_all);
    ASSERT_EQ(model.ordered.size(), 3U);
    EXPECT_EQ(model.ordered[1].name, "vision");
    EXPECT_TRUE(model.ordered[1].bytes.empty());
    EXPECT_EQ(model.ordered[2].name, "rope");
    EXPECT_TRUE(model.ordered[2].bytes.empty());
}

TEST_F(GenerationPrompt, WithAPictureSharesNothingWithEqualTokensAndEndsBehindIt) {
    ASSERT_TRUE(model.read({rope.view(), tokens.view(), vision.view()}));
    EXPECT_FALSE(model.ask.tokens_tell_all);
    EXPECT_EQ(model.ordered[1].bytes.size(), 6 * sizeof(float));

    EXPECT_THAT(model.read({tokens.view(), vision.view()}).error().text(), HasSubstr("input \"rope\" is missing"));

    rope.values = {0, 1, 2, 0, 1, 4, 0, 1, 2};
    const Error refused = model.read({tokens.view(), vision.view(), rope.view()}).error();
    EXPECT_EQ(refused.code, ErrorCode::input_invalid);
    EXPECT_THAT(refused.text(),
                HasSubstr("the last position in \"rope\" is 2, the largest 4; end the prompt with text"));
}

TEST(GenerationPromptRoom, TheLastTokenTakesNoPosition) {
    Shape shape;
    shape.length = 8;
    shape.vocabulary = 100;
    shape.inputs = {{"tokens", wire::DType::int64, {along}}};
    Prompting model{shape};
    Given<std::int64_t> tokens{"tokens", wire::DType::int64, {0}, {}};
    for (const std::uint32_t length : {1U, 7U, 8U}) {
        tokens.values.assign(length, 1);
        tokens.dims = {length};
        const Result<> read = model.read({tokens.view()});
        ASSERT_TRUE(read) << read.error().text();
        ASSERT_TRUE(read_parameters(shape, {}, model.ask));
        EXPECT_EQ(model.ask.new_max, 9 - length);
    }
    tokens.values.assign(9, 1);
    tokens.dims = {9};
    EXPECT_THAT(model.read({tokens.view()}).error().text(), HasSubstr("the prompt has 9 positions"));
}

TEST(GenerationPromptIds, AreThoseOfThePromptNotOfWhatIsGenerated) {
    Shape speaking;
    speaking.length = 32;
    speaking.vocabulary = 26;
    speaking.codebooks = 2;
    speaking.inputs = {{"tokens", wire::DType::int64, {along, fixed(2)}}};
    Prompting without_text{speaking};
    Given<std::int64_t> tokens{"tokens", wire::DType::int64, {2, 2}, {0, 25, 25, 0}};
    EXPECT_TRUE(without_text.read({tokens.view()}));
    tokens.values[3] = 26;
    EXPECT_FALSE(without_text.read({tokens.view()}));

    speaking.prompt_id_min = -1;
    speaking.prompt_id_end = 320;
    Prompting model{std::move(speaking)};
    tokens.values = {319, -1, 25, 0};
    EXPECT_TRUE(model.read({tokens.view()}));
    EXPECT_TRUE(model.ask.tokens_tell_all);
    for (const std::int64_t bad : {-2, 320}) {
        tokens.values[2] = bad;
        EXPECT_THAT(model.read({tokens.view()}).error().text(), HasSubstr("send ids from -1 to 319"));
    }
    tokens.values = {319, -1, 25, 26};
    const Error refused = model.read({tokens.view()}).error();
    EXPECT_EQ(refused.code, ErrorCode::input_invalid);
    EXPECT_THAT(refused.text(), HasSubstr("token 1 of the prompt is [25, 26]; a row of text is its id and 1 times -1, "
                                          "a row of audio 2 codes from 0 to 25"));
    for (const auto& [id, code] : {std::pair{26, 3}, {-1, 3}, {-1, -1}, {319, 0}}) {
        tokens.values = {319, -1, id, code};
        EXPECT_FALSE(model.read({tokens.view()})) << id << ", " << code;
    }
}

}  // namespace
}  // namespace bulkhead::worker::generation
