"""Speech and sound: CTC and spectra."""

import jax
import jax.numpy as jnp
import optax
from corpus import (
    Program,
    apply_dense,
    dense,
    normal,
    program,
    two_layers,
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
