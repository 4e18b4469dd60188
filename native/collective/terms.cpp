#include <netfold/collective/terms.hpp>

namespace netfold::collective {
namespace {

Form with_average(Form form, bool average) {
  return average ? static_cast<Form>(static_cast<std::uint8_t>(form) + 1) : form;
}

bool is_average(Form form) {
  return form == Form::all_reduce_avg || form == Form::reduce_avg || form == Form::reduce_scatter_avg ||
         form == Form::step_avg;
}

bool has_root(Form form) { return form == Form::reduce || form == Form::reduce_avg || form == Form::broadcast; }

Form form_of(const Call& call) {
  const bool average = call.average || (call.step_of & kStepOfAverage) != 0;
  switch (call.kind) {
    case Kind::all_reduce:
      return with_average(call.step_of != 0 ? Form::step : Form::all_reduce, average);
    case Kind::reduce:
      return with_average(Form::reduce, average);
    case Kind::reduce_scatter:
      return with_average(Form::reduce_scatter, average);
    case Kind::broadcast:
      return Form::broadcast;
    case Kind::all_gather:
      return Form::all_gather;
    default:
      return Form::barrier;
  }
}

const char* word(Form form) {
  switch (form) {
    case Form::all_reduce:
    case Form::all_reduce_avg:
      return "all_reduce";
    case Form::reduce:
    case Form::reduce_avg:
      return "reduce";
    case Form::reduce_scatter:
    case Form::reduce_scatter_avg:
      return "reduce_scatter";
    case Form::broadcast:
      return "broadcast";
    case Form::all_gather:
      return "all_gather";
    case Form::barrier:
      return "barrier";
    case Form::step:
    case Form::step_avg:
      return "a step of all_reduce";
  }
  return "?";
}

}  // namespace

Terms Terms::of(const Call& call) {
  const Form form = form_of(call);
  return {.form = form,
          .dtype = form == Form::barrier ? kernels::DType::u8 : call.dtype,
          .root = has_root(form) ? static_cast<std::uint8_t>(call.root) : std::uint8_t{0}};
}

std::uint16_t Terms::packed() const {
  return static_cast<std::uint16_t>(static_cast<unsigned>(form) | static_cast<unsigned>(dtype) << 4 |
                                    static_cast<unsigned>(root) << 8);
}

std::optional<Terms> Terms::unpacked(std::uint16_t bits) {
  const std::uint8_t form = bits & 0xf;
  const std::uint8_t dtype = bits >> 4 & 0xf;
  const Terms terms{static_cast<Form>(form), static_cast<kernels::DType>(dtype), static_cast<std::uint8_t>(bits >> 8)};
  if (form >= kFormCount || !kernels::is_valid_dtype(dtype) || (terms.root != 0 && !has_root(terms.form))) {
    return std::nullopt;
  }
  return terms;
}

bool Terms::has_blocks() const {
  return form == Form::all_gather || form == Form::reduce_scatter || form == Form::reduce_scatter_avg;
}

std::string Terms::text(std::uint32_t operation, std::uint32_t elements, kernels::ReduceOp reduce) const {
  std::string text = std::string(word(form)) + " #" + std::to_string(operation);
  if (form == Form::barrier) return text;
  const char* const of = kernels::name(dtype);
  text += has_blocks() ? std::string(" of ") + of + " (digest of all sizes: " + std::to_string(elements & 0xffff) + ")"
                       : " of " + std::to_string(elements) + " " + of;
  const bool moves = form == Form::broadcast || form == Form::all_gather;
  std::string how = moves ? "" : is_average(form) ? "avg" : kernels::name(reduce);
  if (has_root(form)) how += (how.empty() ? "root " : ", root ") + std::to_string(root);
  return how.empty() ? text : text + " (" + how + ")";
}

}  // namespace netfold::collective
