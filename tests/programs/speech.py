"""Speech and sound: spectrograms, CTC, transducers, waveforms, speakers, codecs."""

import jax
import jax.numpy as jnp
import optax
from corpus import (
    Program,
    apply_dense,
    dense,
    integers,
    normal,
    program,
    two_layers,
    weight,
)


@program("jax")
def masked_ctc():
    """CTC whose logits of letters that a language lacks are masked with -1e9."""
    params = two_layers(8, 24, 6)
    allowed = jnp.array([True, True, True, False, True, True])
    labels = jnp.array([[1, 2, 4], [5, 5, 1]])

    def loss(params, batch):
        frames, labels = batch
        hidden = jnp.tanh(apply_dense(params["hidden"], frames))
        logits = apply_dense(params["head"], hidden)
        logits = jnp.where(allowed, logits, -1e9)
        nothing = jnp.zeros(logits.shape[:2])
        losses = optax.ctc_loss(logits, nothing, labels, jnp.zeros(labels.shape))
        return losses.mean(), {}

    return Program(loss, params, (normal(2, 9, 8, seed=3), labels))


@program("jax")
def transducer():
    """RNN-T: every frame with every label, the forward variables by two scans in log space."""
    params = {
        "frames": weight(8, 16, seed=1),
        "labels": normal(6, 16, seed=2),
        "head": dense(16, 6, seed=3),
    }

    def log_likelihood(params, frames, labels):
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), labels])
        embedded_frames = frames @ params["frames"]
        x = embedded_frames[:, None] + params["labels"][before][None]
        logits = apply_dense(params["head"], jnp.tanh(x))
        log_probs = jax.nn.log_softmax(logits)
        blank = log_probs[:, :, 0]
        before_last = log_probs[:, :-1]
        letters = labels[None, :, None]
        emitted = jnp.take_along_axis(before_last, letters, axis=-1)[..., 0]

        def along_labels(start, emission):
            def turn(left, step):
                below, emission = step
                value = jnp.logaddexp(below, left + emission)
                return value, value

            _, rest = jax.lax.scan(turn, start[0], (start[1:], emission))
            return jnp.concatenate([start[:1], rest])

        first = jnp.concatenate([jnp.zeros(1), jnp.cumsum(emitted[0])])

        def turn(alpha, step):
            blank_before, emission = step
            return along_labels(alpha + blank_before, emission), None

        alpha, _ = jax.lax.scan(turn, first, (blank[:-1], emitted[1:]))
        return alpha[-1] + blank[-1, -1]

    def loss(params, batch):
        frames, labels = batch
        of_batch = jax.vmap(log_likelihood, in_axes=(None, 0, 0))
        return -of_batch(params, frames, labels).mean(), {}

    batch = normal(3, 6, 8, seed=4), integers(5, 3, 3, seed=5) + 1
    return Program(loss, params, batch)


@program("jax")
def spectral_vocoder():
    """A waveform from features, compared by the logarithm of its short-time spectrum."""
    params = {"hidden": dense(8, 24, seed=1), "out": dense(24, 8, seed=2)}
    window = jnp.hanning(16)

    def spectrum(wave):
        starts = jnp.arange(0, wave.shape[-1] - 15, 8)
        places = starts[:, None] + jnp.arange(16)[None]
        frames = wave[..., places]
        coefficients = jnp.fft.rfft(frames * window)
        return jnp.abs(coefficients) + 1e-2

    def loss(params, batch):
        features, wanted = batch
        hidden = jax.nn.leaky_relu(apply_dense(params["hidden"], features))
        wave = apply_dense(params["out"], hidden)
        wave = wave.reshape(len(features), -1)
        spoken = spectrum(wave)
        wanted = spectrum(wanted)
        difference = jnp.log(spoken) - jnp.log(wanted)
        magnitude = jnp.abs(difference).mean()
        error = jnp.linalg.norm(wanted - spoken)
        convergence = error / jnp.linalg.norm(wanted)
        return magnitude + convergence, {}

    return Program(loss, params, (normal(2, 6, 8, seed=3), normal(2, 48, seed=4)))
